"""The latency benchmark of `trtllm-bench`: what runs, how it is measured, how it is told."""
