"""Measures methods beside plain decoding: one code path, interleaved, resumable."""
