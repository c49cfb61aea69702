"""Tests that only `make test-all` runs, by file and by a pattern for the end of the test's id.

They are slow for what they are likely to find: tests that need a browser or a second installation,
repeats in another size or dtype of what `make test` runs once, and servers that start for one rare
way of ending. Matrices mark their own combinations (`pytest.mark.full`).
"""

from __future__ import annotations

import re

FULL: dict[str, tuple[str, ...]] = {
    "tests/reference/test_rank_processes.py": (
        "test_processes_answer_as_one_rank_does_by_gloo",
        "test_rank_that_stalls_within_a_step_ends_a_group_by_gloo",
        "test_rank_that_reads_no_more_plans_ends_the_group",
        "test_rank_ends_if_the_first_one_ends_before_they_meet",
    ),
    "tests/reference/test_ranks.py": (
        r"some_of_the_experts_answer_as_one_does\[gpt_oss in MXFP4-2",
    ),
    "tests/reference/test_random_engines.py": (r"plain_decoding\[10\]",),
    "tests/server/test_served_replicas.py": ("test_engines_answer_alike",),
    "tests/server/test_soak.py": ("test_hostile_grammars",),
    "tests/kernels/test_rank_ops.py": (r"two_ranks_match_one\[.*-True\]",),
    "tests/server/test_openai_client.py": ("test_key_is_required",),
    "tests/server/test_page.py": ("",),
    "tests/server/test_page_access.py": ("",),
    "tests/server/test_page_chats.py": ("",),
    "tests/server/test_page_reading.py": ("",),
    "tests/server/test_page_server.py": ("",),
    "tests/server/test_stopping.py": (
        "test_unfinished_request_at_deadline",
        "test_engine_death_fails_open_requests",
        "test_third_engine_end",
        "test_sigterm_while_the_engine_restarts",
        "test_sigterm_during_engine_start",
        "test_server_reports_engine_start",
    ),
    "tests/unit/test_wheel.py": ("",),
    "tests/unit/test_bench_load.py": (
        r"replay_accepts_drafts_as_recorded\[(1-7|2-3)\]",
        "test_two_ranks_record_what_one_does",
        "test_two_ranks_replay_as_recorded",
    ),
    "tests/unit/test_cli_streams.py": ("test_ctrl_c_while_a_server_loads_is_quiet",),
    "tests/unit/test_train.py": ("test_compiled_steps_are_full_graphs",),
    "tests/unit/test_doctor.py": (r"reports_the_fault\[(?!truncated tensor|other vocabulary)",),
    "tests/reference/test_capture.py": (
        r"captures_everything\[(5-1|8-1|8-2)\]",
        r"every_adaptive_choice\[1\]",
    ),
    "tests/kernels/test_attention.py": (
        r"test_heads\[(?!64-2-1).*-False",
        r"test_windows\[(True-(2|16|200)-|False-(1|45)-)",
        r"test_split_blocks\[mask[134]-",
        r"test_split_blocks_of_every_size\[(128-128|64-64)",
        r"test_long_spans\[mask1",
        r"test_wide_heads\[(1|8)-",
        r"test_span_sizes\[mask[03]-(2|16)",
        r"test_sinks\[64-2-8-mask[02]",
        r"test_half_precision\[True-dtype0",
        r"test_backend_agrees_with_the_reference\[mask[02]-False",
    ),
    "tests/kernels/test_recurrent.py": (
        r"more than a program's values-torch.bfloat16",
        r"odd sizes-torch.float32",
    ),
    "tests/kernels/test_linear.py": (
        r"test_any_number_of_rows\[\d-(3|16|100)-",
        r"test_fusions\[.*-64-96-1",
    ),
    "tests/kernels/test_narrow.py": (
        r"test_chooses_most_likely_drafts\[(33-15-(?![0-3]\])|70-15-(?!0\])|200-15-)",
    ),
    "tests/kernels/test_sampling.py": (
        r"test_(number_of_kept_tokens|top_k_within_a_lane|filters_keep_ties|banned_tokens\w*)"
        r"\[dtype1",
        r"test_sampling_with_real_vocabulary_size\[(flat-dtype1|peaked-dtype0)",
    ),
}


def is_full(node_id: str) -> bool:
    """Whether a test is in the table."""
    path, _, name = node_id.partition("::")
    return any(re.search(pattern, name) for pattern in FULL.get(path, ()))
