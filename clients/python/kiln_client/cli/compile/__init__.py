"""Commands that ask the compiler: `kiln compile`, `kiln shard-weights`, `kiln plan` and `kiln operations …`."""
