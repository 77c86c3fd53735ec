/* Compares products of random numbers with plain loops, for `test_products.py`, on a processor that an emulator stands for. */

#include "_products.c"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

static float *drawn(long count) {
    float *numbers = malloc((size_t)count * sizeof(float));
    for (long i = 0; i < count; i++) numbers[i] = (float)rand() / (float)RAND_MAX - 0.5f;
    return numbers;
}

static double worst(long rows, long columns, long depth, long threads) {
    const char *name;
    const Kernel *kernel = chosen(&name);
    float *x = drawn(rows * depth), *weight = drawn(columns * depth), *out = drawn(rows * columns), *panels;
    panels = drawn((columns + kernel->width - 1) / kernel->width * kernel->width * depth);
    pack_all(weight, columns, depth, kernel->width, panels);
    const Product product = {.kernel = kernel, .x = x, .x_stride = depth, .packed = panels, .out = out,
                             .rows = rows, .columns = columns, .depth = depth};
    multiply_all(&product, threads);
    double most = 0.0;
    for (long row = 0; row < rows; row++)
        for (long column = 0; column < columns; column++) {
            double sum = 0.0;
            for (long k = 0; k < depth; k++) sum += (double)x[row * depth + k] * (double)weight[column * depth + k];
            most = fmax(most, fabs(sum - (double)out[row * columns + column]));
        }
    return most;
}

int main(void) {
    const char *name;
    chosen(&name);
    printf("%s", name);
    for (long rows = 1; rows < 20; rows++)
        if (!(worst(rows, 5 + 7 * rows, 40, 1) < 1e-5)) return 1;
    if (!(worst(9, 30, 5000, 1) < 1e-3)) return 2;
    return worst(200, 400, 300, 3) < 1e-4 ? 0 : 3;
}
