"""Several processes, one run: process 0 plans and tells the others what to do; a process that dies ends the run.

    process 0   engine ─► runner ──┬─► its devices ◄── collectives ──► devices of process 1 …
                                   └─► one message a step (TCP) ─────► `following`: the same programs on the same arrays

The messages have connections of their own, beside those of `jax.distributed`: a broken one is seen at once, whatever
the devices wait for. They are pickles, read by the others alone, from the process 0 that they were sent to; what the
others answer is plain bytes. The network is trusted, as `jax.distributed` trusts it.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import pickle
import queue
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

import jax
import numpy as np

Message = tuple[Any, ...]
Buffer = bytes | bytearray | memoryview
_STOP = "stop"
_LENGTH = struct.Struct("!Q")
_MOST_GREETING = 4096
_LINGER_S = 5.0  # a process ends in less, once it is about to
_GREETING_S = 5.0  # ours greet at once; who says nothing may not keep the others out


@dataclass(frozen=True)
class Hosts:
    """The processes of a run.

    Attributes:
        address: "host:port" of process 0, for `jax.distributed`; messages use the port after it.
        count: Processes.
        index: Of this one, from 0.
        wait_s: How long to wait for the others at the start.
    """

    address: str
    count: int
    index: int
    wait_s: float = 300.0

    def __post_init__(self) -> None:
        host, _, port = self.address.rpartition(":")
        bare = host[1:-1] if host[:1] + host[-1:] == "[]" else host
        if not bare or not port.isdecimal() or not 0 < int(port) < 65535 or (":" in bare) != (bare != host):
            raise ValueError(
                f"hosts {self.address}: must be HOST:PORT of process 0, as 10.0.0.1:4321 or [fd00::1]:4321"
            )
        if not 0 <= self.index < self.count or self.count < 2:
            raise ValueError(
                f"hosts: process {self.index} of {self.count}: must be at least 2, counted from 0 to "
                f"{max(self.count, 2) - 1}"
            )

    @property
    def messages(self) -> tuple[str, int]:
        """Where process 0 is for the others' messages."""
        host, _, port = self.address.rpartition(":")
        return host.strip("[]"), int(port) + 1

    @classmethod
    def of_launcher(cls, wait_s: float = 300.0) -> Hosts | None:
        """The processes that a launcher started, by what jax knows of SLURM, Open MPI, Kubernetes and TPU slices.

        Args:
            wait_s: How long to wait for the others at the start.

        Returns:
            None where it started this process alone.

        Raises:
            ValueError: No launcher is known here.
        """
        from jax._src.clusters import ClusterEnv  # jax says it nowhere else before its own processes have met

        port = os.environ.get("JAX_COORDINATOR_PORT")
        for kind in ClusterEnv._cluster_types:
            if kind.opt_in_only_method or not kind.is_env_present():
                continue
            if kind.get_process_count() == 1:
                return None
            host, _, own = kind.get_coordinator_address(
                timeout_secs=int(wait_s), override_coordinator_port=port
            ).rpartition(":")
            address = f"{host}:{min(int(own), 65534)}"  # messages use the port after it
            return cls(address, kind.get_process_count(), kind.get_process_id(), wait_s)
        raise ValueError(
            "hosts auto: no launcher is known here (SLURM, Open MPI 4, Kubernetes, Cloud TPU); give HOST:PORT, "
            "--processes and --process"
        )


def join(hosts: Hosts, settings: str) -> Channel:
    """Meet the other processes, then let jax see all their devices; to be called before jax has looked for any.

    From here on the standard output holds what Python prints: what libraries write to it goes to the standard error.

    Args:
        hosts: The processes.
        settings: Digest of what must be equal in all of them.

    Raises:
        ValueError: The others did not come in time, or have other settings.
    """
    keep_stdout()
    channel = Channel(hosts, settings)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.config.update(
        "jax_enable_preemption_service", False
    )  # it keeps SIGTERM, by which launchers end processes
    jax.distributed.initialize(hosts.address, hosts.count, hosts.index)
    return channel


def keep_stdout() -> None:
    """Results alone reach the standard output: gloo writes its greetings there."""
    sys.stdout.flush()
    own = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    sys.stdout = own


class Channel:
    """Messages from process 0 to the others, and who is still there.

    Attributes:
        sent_bytes / num_messages: By process 0, to each of the others.
    """

    def __init__(self, hosts: Hosts, settings: str) -> None:
        self.hosts = hosts
        self.sent_bytes = self.num_messages = 0
        self._inbox: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._answers: queue.SimpleQueue[tuple[int, bytearray]] = queue.SimpleQueue()
        self._telling = threading.RLock()  # a thread that reads the weights, beside one that makes steps
        self._ending = False
        settings = f"{hosts.count} {settings}"
        self._peers = self._listen(settings) if hosts.index == 0 else {0: self._connect(settings)}
        for index, peer in self._peers.items():
            threading.Thread(target=self._read, args=(index, peer), daemon=True).start()

    def _listen(self, settings: str) -> dict[int, socket.socket]:
        deadline = time.monotonic() + self.hosts.wait_s
        found: dict[int, socket.socket] = {}
        with _server(*self.hosts.messages) as server:
            while len(found) < self.hosts.count - 1:
                server.settimeout(max(0.01, deadline - time.monotonic()))
                try:
                    peer, index, theirs = _greeted(server)
                except (OSError, EOFError, ValueError, TypeError):
                    missing = sorted(set(range(1, self.hosts.count)) - found.keys())
                    if time.monotonic() < deadline:
                        continue  # a connection that was no process of ours
                    for one in found.values():
                        one.close()
                    raise ValueError(
                        f"hosts: process {missing[0]} did not come within {self.hosts.wait_s:g} s; start all "
                        f"{self.hosts.count} with the same --hosts"
                    ) from None
                same = theirs == settings and index not in found
                _frame(peer, json.dumps("welcome" if same else "refused").encode())
                if not same:
                    for one in (peer, *found.values()):
                        one.close()
                    raise ValueError(
                        f"hosts: process {index} has other settings, or came twice; start all with the same ones"
                    )
                found[index] = _lasting(peer)
        return found

    def _connect(self, settings: str) -> socket.socket:
        deadline = time.monotonic() + self.hosts.wait_s
        while True:
            try:
                peer = socket.create_connection(self.hosts.messages, timeout=self.hosts.wait_s)
                _frame(peer, json.dumps([self.hosts.index, settings]).encode())
                answer = json.loads(_framed(peer, _MOST_GREETING))
                break
            except (OSError, EOFError):  # process 0 is not there yet
                if time.monotonic() > deadline:
                    raise ValueError(
                        f"hosts: process 0 at {self.hosts.address} is not there after {self.hosts.wait_s:g} s; start it"
                    ) from None
                time.sleep(0.05)
        if answer != "welcome":
            peer.close()
            raise ValueError(
                "hosts: process 0 has other settings, or this process is there already; start all alike"
            )
        return _lasting(peer)

    def _read(self, index: int, peer: socket.socket) -> None:
        try:
            while True:
                data = _framed(peer)
                if self.hosts.index == 0:  # plain bytes: the others are never believed more than that
                    self._answers.put((index, data))
                    continue
                message: Message = pickle.loads(data)
                self._ending |= message[0] == _STOP
                self._inbox.put(message)
        except (OSError, EOFError):
            if not self._ending:
                self._gone(index)
        finally:
            peer.close()

    def _gone(self, index: int) -> NoReturn:
        """End this process at once: its devices may wait for ever for those of the other."""
        line = f"error: process {index} of {self.hosts.count} is gone: the run needs all of them; start them again\n"
        with contextlib.suppress(OSError, ValueError):
            sys.stderr.flush()
        with contextlib.suppress(
            OSError
        ):  # what libraries say of it from now on is nobody's: ours is the last line
            shown = os.dup(2)
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
            os.write(shown, line.encode())
        os._exit(1)

    def tell(self, message: Message, own: Callable[[int], Message] | None = None) -> None:
        """From process 0 to the others: one message; `own` is what each of them gets beside it, by its index."""
        with self._telling:
            if self._ending:
                raise RuntimeError("hosts: the other processes have been ended; start all of them again")
            data, longest = b"", 0
            try:
                for index, peer in self._peers.items():
                    if own is not None or not data:
                        whole = message if own is None else (*message, *own(index))
                        data = pickle.dumps(whole, protocol=pickle.HIGHEST_PROTOCOL)
                    longest = max(longest, len(data))
                    try:
                        _frame(peer, data)
                    except OSError:
                        self._gone(index)
            except BaseException as error:  # some have it, others not, or half of it
                self.abandon(error)
                raise
            self.sent_bytes += longest
            self.num_messages += 1

    def ask(self, message: Message) -> dict[int, bytearray]:
        """From process 0 to the others: a message to which each answers with bytes; those, by process."""
        with self._telling:
            self.tell(message)
            try:
                return dict(self._answers.get() for _ in self._peers)
            except BaseException as error:  # a late answer would be taken for that to the next question
                self.abandon(error)
                raise

    def answer(self, array: np.ndarray) -> None:
        """To process 0, which has asked."""
        _frame(self._peers[0], np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)

    def next(self) -> Message:
        """The next message of process 0."""
        return self._inbox.get()

    def counts(self) -> dict[str, float]:
        """Processes, messages, and the mean bytes of a message to each of the others."""
        mean = self.sent_bytes / self.num_messages if self.num_messages else 0.0
        return {"processes": self.hosts.count, "messages": self.num_messages, "message_bytes": mean}

    def close(self) -> None:
        """Process 0: the others end, too."""
        if self.hosts.index == 0 and not self._ending:
            self.tell((_STOP,))
            self._ending = True
            self._hang_up(socket.SHUT_WR)

    def abandon(self, error: BaseException) -> None:
        """After something failed here: nobody knows how far the others got, so they end, as if this process had.

        Those who follow another wait with it for their own end, a few seconds at most: process 0 is jax's coordinator,
        and jax aborts a process whose coordinator is gone.

        Args:
            error: What failed. Devices that miss those of another process fail before its connection is seen to break.
        """
        if not self._ending and _of_devices(error):
            time.sleep(_LINGER_S)  # in which `_gone` names who is gone
        if self._ending:
            return
        self._ending = True
        _leave_jax()
        if self.hosts.index == 0:
            self._hang_up(socket.SHUT_RDWR)
            return
        late = threading.Timer(_LINGER_S, self._hang_up, (socket.SHUT_RDWR,))
        late.daemon = True
        late.start()

    def _hang_up(self, how: int) -> None:
        for peer in self._peers.values():
            with contextlib.suppress(OSError):  # it may be gone already
                peer.shutdown(how)  # a thread waits on it: closed alone it would stay open


def _of_devices(error: BaseException | None) -> bool:
    """Whether an error, or what it was raised for, is one of the devices."""
    while error is not None and not isinstance(error, jax.errors.JaxRuntimeError):
        error = error.__cause__ or error.__context__
    return error is not None


def _leave_jax() -> None:
    """Keep jax from waiting for the others when this process ends: they are gone then, and it would abort."""
    from jax._src.distributed import global_state  # jax.distributed.shutdown is what waits

    for name in ("client", "service"):
        held = getattr(global_state, name)
        if held is not None:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(held))  # to destroy it is to shut it down
            setattr(global_state, name, None)


def _server(host: str, port: int) -> socket.socket:
    """Where the others find process 0: on this machine alone where that is meant, else on every interface.

    A name may lead elsewhere than to the interface that the others reach, as jax's own coordinator knows.
    """
    if host in ("127.0.0.1", "localhost"):
        return socket.create_server((host, port))
    if host == "::1":
        return socket.create_server((host, port), family=socket.AF_INET6)
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)


def _greeted(server: socket.socket) -> tuple[socket.socket, int, Any]:
    """The next connection, the process that it says it is, and its settings; closed again where it says nothing."""
    peer, _ = server.accept()
    try:
        peer.settimeout(_GREETING_S)
        index, settings = json.loads(_framed(peer, _MOST_GREETING))
        return peer, int(index), settings
    except BaseException:
        peer.close()
        raise


def _frame(peer: socket.socket, data: Buffer) -> None:
    if len(data) > 1 << 16:  # no copy of a large one
        peer.sendall(_LENGTH.pack(len(data)))
        peer.sendall(data)
    else:
        peer.sendall(_LENGTH.pack(len(data)) + data)


def _framed(peer: socket.socket, most: int = 1 << 40) -> bytearray:
    (length,) = _LENGTH.unpack(_exactly(peer, _LENGTH.size))
    if length > most:
        raise EOFError
    return _exactly(peer, length)


def _exactly(peer: socket.socket, count: int) -> bytearray:
    data = bytearray()
    while len(data) < count:
        part = peer.recv(min(count - len(data), 1 << 20))
        if not part:
            raise EOFError
        data += part
    return data


def _lasting(peer: socket.socket) -> socket.socket:
    """Without a limit on waiting; a machine that is lost without a word is noticed after 20 s."""
    peer.settimeout(None)
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 5), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3)):
        if hasattr(socket, name):
            peer.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    return peer
