"""The `mini-infer` command, on top of the library. Nothing of the library imports it."""
