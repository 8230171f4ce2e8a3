"""What an OCI image layout holds: how bundles are written to it, read, copied and removed."""
