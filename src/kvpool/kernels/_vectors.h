/* Vectors of LANES floats, for the C code of CPUs. Its files include this one once for each instruction set, for which they
   have defined

     LANES     floats in a vector
     TARGET    the attribute that allows the instructions
     NAME(x)   x with the name of the instruction set

   and include `_vectors_end.h` behind their last function. */

#define vec NAME(vec)
#define ints NAME(ints)
#define words NAME(words)
#define halves NAME(halves)
#define INLINE static inline __attribute__((always_inline)) TARGET

typedef float vec __attribute__((vector_size(4 * LANES)));
typedef int32_t ints __attribute__((vector_size(4 * LANES)));
typedef uint32_t words __attribute__((vector_size(4 * LANES)));
typedef uint16_t halves __attribute__((vector_size(2 * LANES)));

INLINE vec NAME(load)(const float *from) {
    vec value;
    memcpy(&value, from, sizeof value);
    return value;
}

INLINE void NAME(store)(float *to, vec value) { memcpy(to, &value, sizeof value); }

INLINE vec NAME(all)(float value) { return value - (vec){0}; }

INLINE vec NAME(choose)(ints condition, vec yes, vec no) {
    return (vec)((condition & (ints)yes) | (~condition & (ints)no));
}

/* 2 to the power of x, within 2e-7 of it; below 2 to the power of -126 it is 0. */
INLINE vec NAME(power)(vec x) {
    const vec lowest = NAME(all)(-126.0f), highest = NAME(all)(126.0f), round = NAME(all)(12582912.0f);
    const ints vanishes = x < lowest;
    x = NAME(choose)(vanishes, lowest, NAME(choose)(x > highest, highest, x));
    const vec whole = (x + round) - round, part = x - whole;
    vec result = NAME(all)(1.5403530e-4f);
    result = result * part + 1.3333558e-3f;
    result = result * part + 9.6181291e-3f;
    result = result * part + 5.5504109e-2f;
    result = result * part + 2.4022651e-1f;
    result = result * part + 6.9314718e-1f;
    result = result * part + 1.0f;
    const ints exponent = __builtin_convertvector(whole, ints) << 23;
    return NAME(choose)(vanishes, (vec){0}, (vec)((ints)result + exponent));
}

INLINE vec NAME(from_bfloat16)(const void *from) {
    halves stored;
    memcpy(&stored, from, sizeof stored);
    return (vec)(__builtin_convertvector(stored, words) << 16);
}

/* To the nearest bfloat16, the even one of two. */
INLINE halves NAME(to_bfloat16)(vec value) {
    const words bits = (words)value, rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    const words is_number = (words)(value == value);
    return __builtin_convertvector((is_number & rounded) | (~is_number & 0x7fc0), halves);
}
