"""Workloads as data: read from files and recordings, written, described, synthesised."""
