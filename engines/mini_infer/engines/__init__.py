"""Everything that makes tokens. Knows nothing of gRPC. Importing this package does not load torch."""
