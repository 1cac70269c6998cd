"""Benchmarks beside other workflow runtimes, which are in an environment of their own and never imported here."""
