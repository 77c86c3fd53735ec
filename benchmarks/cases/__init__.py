"""What benchmarks run: the parts that several of them share, and the cases of those that have many."""
