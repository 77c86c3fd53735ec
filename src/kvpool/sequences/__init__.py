"""The life of a request: admission, steps, forks, rewinds, publishing, swapping; its handle and its batches."""
