/* Forgets what `_vectors.h` and its file were given, before the next instruction set. */

#undef vec
#undef ints
#undef words
#undef halves
#undef INLINE
#undef LANES
#undef TARGET
#undef NAME
