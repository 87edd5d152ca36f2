"""The gRPC server: dispatcher, servicers, health, and the `mini-infer-server` command."""
