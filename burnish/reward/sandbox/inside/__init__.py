"""What runs as the sandbox's own processes: standard library only, since neither burnish nor its packages are there."""
