/* The arithmetic of `_products.c`, which includes this file once for each instruction set. It has defined

     LANES     floats in a vector
     VECTORS   vectors of a panel's row, and
     ROWS      rows of x whose sums with them fit the registers
     TARGET    the attribute that allows the instructions
     NAME(x)   x with the name of the instruction set */

#include "_vectors.h"

#define WIDTH (LANES * VECTORS)

/* `rows` rows of x times a part of a panel. Meanwhile some lines of memory that are needed next are asked for. */
INLINE void NAME(multiply_tile)(const Tile *tile, const int rows) {
    const float *x = tile->x, *panel = tile->panel;
    const char *next = tile->next;
    const long stride = tile->x_stride, depth = tile->depth, lines = tile->lines;
    vec sums[ROWS][VECTORS];
#pragma GCC unroll 8
    for (int row = 0; row < rows; row++)
#pragma GCC unroll 8
        for (int i = 0; i < VECTORS; i++) sums[row][i] = (vec){0};
    for (long k = 0; k < depth; k++, panel += WIDTH) {
        vec weights[VECTORS];
#pragma GCC unroll 8
        for (int i = 0; i < VECTORS; i++) weights[i] = NAME(load)(panel + i * LANES);
        for (long i = 0; i < lines; i++, next += LINE) __builtin_prefetch(next, 0, 2);
#pragma GCC unroll 8
        for (int row = 0; row < rows; row++)
#pragma GCC unroll 8
            for (int i = 0; i < VECTORS; i++) sums[row][i] += weights[i] * x[row * stride + k];
    }
#pragma GCC unroll 8
    for (int row = 0; row < rows; row++) {
        float *out = tile->out + row * tile->out_stride, whole[WIDTH];
#pragma GCC unroll 8
        for (int i = 0; i < VECTORS; i++) memcpy(whole + i * LANES, &sums[row][i], sizeof(vec));
        if (tile->adds)
            for (long i = 0; i < tile->columns; i++) out[i] += whole[i];
        else if (tile->columns == WIDTH)
            memcpy(out, whole, sizeof whole);
        else
            memcpy(out, whole, (size_t)tile->columns * sizeof(float));
    }
}

TARGET static void NAME(multiply)(const Tile *tile, long rows) {
    switch (rows) {
        case 1: NAME(multiply_tile)(tile, 1); break;
        case 2: NAME(multiply_tile)(tile, 2); break;
        case 3: NAME(multiply_tile)(tile, 3); break;
        case 4: NAME(multiply_tile)(tile, 4); break;
        case 5: NAME(multiply_tile)(tile, 5); break;
#if ROWS > 6
        case 6: NAME(multiply_tile)(tile, 6); break;
        case 7: NAME(multiply_tile)(tile, 7); break;
#endif
        default: NAME(multiply_tile)(tile, ROWS);
    }
}

static const Kernel NAME(kernel) = {WIDTH, ROWS, NAME(multiply)};

#undef WIDTH
#undef VECTORS
#undef ROWS
#include "_vectors_end.h"
