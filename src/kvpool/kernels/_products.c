/* multiply(...): x times the transpose of a weight that was packed before, float32 on a CPU.

   A library that gets a weight as it lies copies it, in every call, into the order in which its loops read it. `pack` does
   that once: panels of some columns of the product, in each of them element after element of all its columns. A panel is
   read from its first byte to its last, once for some rows of x, while the next one is asked for. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <string.h>

#include "_threads.h"

#ifndef __GNUC__
#error "vectors are written in the form that GCC and Clang know"
#endif

#define LINE 64          /* bytes that memory gives at a time */
#define X_FLOATS 131072  /* of x, which stay in a core's cache while all panels pass by */
#define MOST_DEPTH 2048  /* elements of a panel that are multiplied at a time, so that it stays there, too */
#define THREAD_WORK 4e6 /* multiplications for which another thread is started */

/* Some rows of x, some elements of a panel, and where their product goes. */
typedef struct {
    const float *x, *panel;
    const char *next;
    float *out;
    long x_stride, out_stride, depth, columns, lines; /* `lines` of `next` are asked for at every element */
    int adds;                                         /* to what is in `out` */
} Tile;

typedef struct {
    long width, rows; /* columns of a panel, rows of a tile */
    void (*multiply)(const Tile *, long rows);
} Kernel;

#if defined(__x86_64__)

#define NAME(x) x##_avx512
#define LANES 16
#define VECTORS 3
#define ROWS 8
#define TARGET __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,fma")))
#include "_products.h"

#define NAME(x) x##_avx2
#define LANES 8
#define VECTORS 2
#define ROWS 6
#define TARGET __attribute__((target("avx2,fma")))
#include "_products.h"

#endif

#define NAME(x) x##_plain
#define LANES 4
#ifdef __aarch64__ /* NEON: every processor has it, and 32 registers */
#define VECTORS 3
#define ROWS 8
#else
#define VECTORS 2
#define ROWS 6
#endif
#define TARGET
#include "_products.h"

#include "_choices.h"

/* The best that this processor can run, and its name. */
static const Kernel *chosen(const char **name) {
    Choice found[MOST_CHOICES];
    choices(found);
    *name = found[0].name;
    return found[0].kernel;
}

/* A product [rows][columns] of x [rows][depth]. */
typedef struct {
    const Kernel *kernel;
    const float *x, *packed;
    float *out;
    long x_stride, rows, columns, depth;
} Product;

/* Rows [from, to) of x times elements [start, end) of one panel. The tiles share the asking for the next panel. */
static void multiply_panel(const Product *product, long from, long to, long start, long end, long number,
                           int has_next) {
    const long width = product->kernel->width, most = product->kernel->rows, first_column = number * width;
    const long num_tiles = (to - from + most - 1) / most, lines_each = width * (long)sizeof(float) / LINE;
    const float *panel = product->packed + (number * product->depth + start) * width;
    Tile tile = {.panel = panel, .x_stride = product->x_stride, .out_stride = product->columns, .depth = end - start};
    tile.columns = smaller(width, product->columns - first_column), tile.adds = start > 0;
    tile.lines = has_next ? (lines_each + num_tiles - 1) / num_tiles : 0;
    tile.next = (const char *)(panel + product->depth * width);
    const char *next_end = tile.next + tile.depth * lines_each * LINE;
    for (long row = from; row < to; row += most) {
        tile.x = product->x + row * product->x_stride + start;
        tile.out = product->out + row * product->columns + first_column;
        product->kernel->multiply(&tile, smaller(most, to - row));
        tile.next += tile.depth * tile.lines * LINE;
        if (tile.next >= next_end) tile.lines = 0;
    }
}

/* Panels [first, last) of a product. */
static void multiply_panels(const void *given, long first, long last) {
    const Product *product = given;
    const long most = product->kernel->rows, step = smaller(product->depth, MOST_DEPTH);
    long rows = X_FLOATS / step / most * most;
    rows = rows < most ? most : rows;
    for (long from = 0; from < product->rows; from += rows)
        for (long start = 0; start < product->depth; start += step)
            for (long number = first; number < last; number++)
                multiply_panel(product, from, smaller(from + rows, product->rows), start,
                               smaller(start + step, product->depth), number, number + 1 < last);
}

static void multiply_all(const Product *whole, long threads) {
    const long panels = (whole->columns + whole->kernel->width - 1) / whole->kernel->width;
    const double work = (double)whole->rows * (double)whole->columns * (double)whole->depth;
    in_threads(multiply_panels, whole, panels, work / THREAD_WORK, threads);
}

/* Columns beyond the last are 0. */
static void pack_all(const float *weight, long columns, long depth, long width, float *packed) {
    for (long first = 0; first < columns; first += width)
        for (long k = 0; k < depth; k++)
            for (long i = 0; i < width; i++)
                *packed++ = first + i < columns ? weight[(first + i) * depth + k] : 0.0f;
}

/* --- Python ------------------------------------------------------------------------------------------------------ */

static PyObject *pack(PyObject *module, PyObject *args) {
    unsigned long long weight, packed;
    Py_ssize_t columns, depth, size;
    const char *name;
    (void)module;
    if (!PyArg_ParseTuple(args, "KnnKn", &weight, &columns, &depth, &packed, &size)) return NULL;
    Py_BEGIN_ALLOW_THREADS
    pack_all((const float *)(uintptr_t)weight, columns, depth, chosen(&name)->width, (float *)(uintptr_t)packed);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

static PyObject *multiply(PyObject *module, PyObject *args) {
    unsigned long long x, packed, out;
    Py_ssize_t x_stride, rows, columns, depth, threads;
    const char *name;
    (void)module;
    if (!PyArg_ParseTuple(args, "KnKKnnnn", &x, &x_stride, &packed, &out, &rows, &columns, &depth, &threads)) return NULL;
    const Product product = {.kernel = chosen(&name), .x = (const float *)(uintptr_t)x, .x_stride = x_stride,
                             .packed = (const float *)(uintptr_t)packed, .out = (float *)(uintptr_t)out,
                             .rows = rows, .columns = columns, .depth = depth};
    Py_BEGIN_ALLOW_THREADS
    multiply_all(&product, threads);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

static PyObject *num_bytes(PyObject *module, PyObject *args) {
    unsigned long long weight;
    long columns, depth;
    const char *name;
    (void)module;
    if (!PyArg_ParseTuple(args, "Kll", &weight, &columns, &depth)) return NULL;
    const long width = chosen(&name)->width;
    return PyLong_FromLong((columns + width - 1) / width * width * depth * (long)sizeof(float));
}

static PyMethodDef METHODS[] = {
    {"pack", pack, METH_VARARGS, "pack(weight, columns, depth, packed, bytes of it): addresses, and the shape of the weight."},
    {"multiply", multiply, METH_VARARGS, "multiply(x, stride of its rows, packed, out, rows, columns, depth, threads)"},
    {"num_bytes", num_bytes, METH_VARARGS, "num_bytes(weight, columns, depth): of its packed form, a whole number of panels."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef MODULE = {PyModuleDef_HEAD_INIT, "_products", NULL, -1, METHODS, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__products(void) { return PyModule_Create(&MODULE); }
