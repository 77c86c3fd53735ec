/* What layers do to each row between their matrix products, on a CPU: RMS norms, gated activations and rotary positions.
   And `put`, which copies rows of K and V into their slots.

   torch does the same in two to eight operations, each of which reads and writes everything. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <math.h>
#include <stdint.h>
#include <string.h>

#ifndef __GNUC__
#error "vectors are written in the form that GCC and Clang know"
#endif

#include "_threads.h"

#define THREAD_WORK 1e5 /* numbers for which another thread is started */

enum { FLOAT32, BFLOAT16 };

/* Rows of `size` numbers of one kind, or of so many in each head, and what is done to them. Strides are in bytes. */
typedef struct {
    const char *x, *y, *z;
    char *out;
    long x_stride, y_stride, z_stride, out_stride, count, size, heads, head_stride;
    int kind;
    float numbers[2];
} Rows;

typedef void (*Operation)(const void *rows, long first, long last);

typedef struct {
    Operation norm, gate, rotate;
} Kernel;

#if defined(__x86_64__)

#define NAME(x) x##_avx512
#define LANES 16
#define TARGET __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,fma")))
#include "_rows.h"

#define NAME(x) x##_avx2
#define LANES 8
#define TARGET __attribute__((target("avx2,fma")))
#include "_rows.h"

#endif

#define NAME(x) x##_plain /* NEON on ARM: every processor has it */
#define LANES 4
#define TARGET
#include "_rows.h"

#include "_choices.h"

/* --- Python ------------------------------------------------------------------------------------------------------ */

static PyObject *all_rows(const Rows *rows, Operation operation, Py_ssize_t threads) {
    const double work = (double)rows->count * (double)rows->size * (double)(rows->heads ? rows->heads : 1);
    Py_BEGIN_ALLOW_THREADS
    in_threads(operation, rows, rows->count, work / THREAD_WORK, threads);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

static PyObject *norm(PyObject *module, PyObject *args) {
    Rows rows = {0};
    const char *name;
    unsigned long long x, weight, out;
    Py_ssize_t threads;
    (void)module;
    if (!PyArg_ParseTuple(args, "silln(Kl)K(Kl)f", &name, &rows.kind, &rows.count, &rows.size, &threads, &x, &rows.x_stride,
                          &weight, &out, &rows.out_stride, &rows.numbers[0]))
        return NULL;
    rows.x = (const char *)(uintptr_t)x, rows.y = (const char *)(uintptr_t)weight, rows.out = (char *)(uintptr_t)out;
    const Kernel *kernel = kernel_named(name);
    return kernel == NULL ? NULL : all_rows(&rows, kernel->norm, threads);
}

static PyObject *gate(PyObject *module, PyObject *args) {
    Rows rows = {0};
    const char *name;
    unsigned long long x, y, out;
    Py_ssize_t threads;
    (void)module;
    if (!PyArg_ParseTuple(args, "silln(Kl)(Kl)(Kl)ff", &name, &rows.kind, &rows.count, &rows.size, &threads, &x,
                          &rows.x_stride, &y, &rows.y_stride, &out, &rows.out_stride, &rows.numbers[0], &rows.numbers[1]))
        return NULL;
    rows.x = (const char *)(uintptr_t)x, rows.y = (const char *)(uintptr_t)y, rows.out = (char *)(uintptr_t)out;
    const Kernel *kernel = kernel_named(name);
    return kernel == NULL ? NULL : all_rows(&rows, kernel->gate, threads);
}

static PyObject *rotate(PyObject *module, PyObject *args) {
    Rows rows = {0};
    const char *name;
    unsigned long long x, cosines, sines, out;
    Py_ssize_t threads;
    (void)module;
    if (!PyArg_ParseTuple(args, "silln(Kl)l(Kl)(Kl)(Kl)l", &name, &rows.kind, &rows.count, &rows.size, &threads, &x,
                          &rows.x_stride, &rows.head_stride, &cosines, &rows.y_stride, &sines, &rows.z_stride, &out,
                          &rows.out_stride, &rows.heads))
        return NULL;
    rows.x = (const char *)(uintptr_t)x, rows.y = (const char *)(uintptr_t)cosines;
    rows.z = (const char *)(uintptr_t)sines, rows.out = (char *)(uintptr_t)out;
    const Kernel *kernel = kernel_named(name);
    return kernel == NULL ? NULL : all_rows(&rows, kernel->rotate, threads);
}

/* Strides are in bytes. Nothing is written if a slot does not exist. */
static PyObject *put(PyObject *module, PyObject *args) {
    unsigned long long rows, slots, target;
    long heads, size, count, from_row, from_head, num_blocks, block_size, block_stride, token_stride, head_stride;
    (void)module;
    if (!PyArg_ParseTuple(args, "(Kll)ll(Kl)(Klllll)", &rows, &from_row, &from_head, &heads, &size, &slots, &count, &target,
                          &num_blocks, &block_size, &block_stride, &token_stride, &head_stride))
        return NULL;
    const int64_t *slot = (const int64_t *)(uintptr_t)slots;
    for (long i = 0; i < count; i++)
        if (slot[i] >= (int64_t)num_blocks * block_size)
            return PyErr_Format(PyExc_IndexError, "slot %lld is not one of the %lld of the store", (long long)slot[i],
                                (long long)num_blocks * block_size);
    if (from_head == size && head_stride == size) size *= heads, heads = 1;
    Py_BEGIN_ALLOW_THREADS
    for (long i = 0; i < count; i++) {
        if (slot[i] < 0) continue;
        const char *from = (const char *)(uintptr_t)rows + i * from_row;
        char *to = (char *)(uintptr_t)target + slot[i] / block_size * block_stride + slot[i] % block_size * token_stride;
        for (long head = 0; head < heads; head++) memcpy(to + head * head_stride, from + head * from_head, (size_t)size);
    }
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

static PyMethodDef METHODS[] = {
    {"norm", norm, METH_VARARGS, "norm(instructions, kind, rows, size, threads, x, address of the weight, out, epsilon)"},
    {"gate", gate, METH_VARARGS,
     "gate(instructions, kind, rows, size, threads, x, y, out, a, b): x * y / (1 + 2 ** -(a * x + b * x ** 3)).\n\n"
     "x, y and out are (address, bytes from one row to the next)."},
    {"rotate", rotate, METH_VARARGS,
     "rotate(instructions, kind, tokens, size, threads, x, bytes between heads, cosines, sines, out, heads)"},
    {"put", put, METH_VARARGS,
     "put((rows, bytes to the next, to the next head), heads, bytes of one, (slots, count), (target, blocks, tokens of a block,\n"
     "bytes to the next block, to the next token, to the next head)): copies rows into slots, and skips those below 0."},
    {"instructions", instructions, METH_NOARGS, "The instruction sets that this processor can run, the best first."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef MODULE = {PyModuleDef_HEAD_INIT, "_rows", NULL, -1, METHODS, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__rows(void) { return PyModule_Create(&MODULE); }
