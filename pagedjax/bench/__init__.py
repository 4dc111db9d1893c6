"""Benches: programs that measure, each beside bounds taken in the same process."""
