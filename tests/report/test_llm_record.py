"""`LLM.record`: what a real run did, without its prompts unless asked."""

from pagedjax import LLM, SamplingParams
from pagedjax.report.record import read_record, replay


def test_a_real_run_is_recorded(tmp_path, monkeypatch):
    from pagedjax.testing import tiny_model

    monkeypatch.setattr("pagedjax.models.load_model", lambda *args, **options: tiny_model())
    llm = LLM(cache__num_blocks=40, cache__block_size=16, scheduler__max_num_seqs=2, progress=False)
    with llm.record(tmp_path / "run.jsonl.gz"):
        llm.generate(["a" * 40, "a" * 40], SamplingParams(max_tokens=3, ignore_eos=True))
        llm.generate("a" * 40, SamplingParams(max_tokens=3, ignore_eos=True))
        state = llm.manager.snapshot()
    frames = list(read_record(tmp_path / "run.jsonl.gz"))
    assert replay(frames).snapshot() == state
    assert frames[0]["kind"] == "measured" and frames[0]["settings"]["cache"]["block_size"] == 16
    assert not any("text" in frame for frame in frames[1:])
    times = [frame["t"] for frame in frames if "t" in frame]
    assert 0 <= times[0] < 60 and times == sorted(times), "seconds since the record began"
    admitted = [hit for frame in frames for _, hit, *_ in frame.get("admitted", ())]
    assert admitted == [0, 0, 32]
