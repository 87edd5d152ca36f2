"""The asynchronous client and the `mini-infer` command. Needs no torch."""
