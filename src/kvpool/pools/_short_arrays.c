/* Operations on arrays of 32-bit integers, most of which are short: token ids and block ids. One is on their bytes.

   numpy does the same (`arrays.py`), and takes ten times as long before it begins: it makes views, looks for a way to convert
   what needs no conversion, and asks whether memory overlaps. Arrays are contiguous; `start` and `stop` count their elements
   one after the other, and are cut to the array as those of a slice are. */

#define PY_SSIZE_T_CLEAN
#define NPY_NO_DEPRECATED_API NPY_1_19_API_VERSION
#include <Python.h>
#include <numpy/arrayobject.h>
#include <stdint.h>
#include <string.h>

#define WIDTH ((Py_ssize_t)sizeof(int32_t))
#define FACTOR 2654435761u /* of checksums: odd, with many bits */

static int is_plain(PyObject *given) {
    if (!PyArray_CheckExact(given)) return 0;
    PyArrayObject *array = (PyArrayObject *)given;
    return PyArray_TYPE(array) == NPY_INT32 && PyArray_IS_C_CONTIGUOUS(array) && PyArray_ISNOTSWAPPED(array);
}

/* The bytes of an array; NULL, and an error, if it is no contiguous one of 32-bit integers. */
static char *elements(PyObject *given) {
    if (is_plain(given)) return PyArray_BYTES((PyArrayObject *)given);
    PyErr_Format(PyExc_TypeError, "expected a contiguous int32 array, got %R", given);
    return NULL;
}

/* Reads `start` and `stop`, cuts them to the array and makes bytes of them; -1, and an error, if one is negative. */
static int read_range(PyObject *array, PyObject *const *given, Py_ssize_t *start, Py_ssize_t *stop) {
    const Py_ssize_t size = PyArray_SIZE((PyArrayObject *)array);
    *start = PyLong_AsSsize_t(given[0]);
    *stop = PyLong_AsSsize_t(given[1]);
    if (*start < 0 || *stop < 0) {
        if (!PyErr_Occurred()) PyErr_SetString(PyExc_IndexError, "start and stop must not be negative");
        return -1;
    }
    if (*stop > size) *stop = size;
    if (*start > *stop) *start = *stop;
    *start *= WIDTH;
    *stop *= WIDTH;
    return 0;
}

static int has_arguments(Py_ssize_t given, Py_ssize_t expected) {
    if (given == expected) return 1;
    PyErr_Format(PyExc_TypeError, "expected %zd arguments, got %zd", expected, given);
    return 0;
}

static PyObject *are_ids(PyObject *module, PyObject *given) {
    (void)module;
    if (!is_plain(given) || PyArray_NDIM((PyArrayObject *)given) != 1 || !PyArray_ISALIGNED((PyArrayObject *)given))
        Py_RETURN_FALSE;
    const Py_ssize_t size = PyArray_SIZE((PyArrayObject *)given);
    const int32_t *ids = (const int32_t *)PyArray_DATA((PyArrayObject *)given);
    int32_t signs = 0;
    for (Py_ssize_t i = 0; i < size; i++) signs |= ids[i];
    return PyBool_FromLong(size > 0 && signs >= 0);
}

/* The first byte, and the number of bytes, of the part of an array that three arguments name; NULL, and an error, if they
   name none. */
static const char *read_part(PyObject *const *args, Py_ssize_t num_args, Py_ssize_t *num_bytes) {
    Py_ssize_t start, stop;
    if (!has_arguments(num_args, 3)) return NULL;
    const char *source = elements(args[0]);
    if (source == NULL || read_range(args[0], args + 1, &start, &stop) < 0) return NULL;
    *num_bytes = stop - start;
    return source + start;
}

static PyObject *copied(PyObject *module, PyObject *const *args, Py_ssize_t num_args) {
    Py_ssize_t num_bytes;
    const char *part = read_part(args, num_args, &num_bytes);
    (void)module;
    if (part == NULL) return NULL;
    npy_intp length = num_bytes / WIDTH;
    PyObject *copy = PyArray_SimpleNew(1, &length, NPY_INT32);
    if (copy != NULL) memcpy(PyArray_DATA((PyArrayObject *)copy), part, (size_t)num_bytes);
    return copy;
}

static PyObject *put(PyObject *module, PyObject *const *args, Py_ssize_t num_args) {
    Py_ssize_t start, stop;
    (void)module;
    if (!has_arguments(num_args, 5)) return NULL;
    char *target = elements(args[0]);
    const char *source = target == NULL ? NULL : elements(args[2]);
    const Py_ssize_t at = source == NULL ? -1 : PyLong_AsSsize_t(args[1]);
    if (source == NULL || (at < 0 && PyErr_Occurred())) return NULL;
    if (read_range(args[2], args + 3, &start, &stop) < 0) return NULL;
    const Py_ssize_t length = (stop - start) / WIDTH, room = PyArray_SIZE((PyArrayObject *)args[0]) - at;
    if (at < 0 || length > room || !PyArray_ISWRITEABLE((PyArrayObject *)args[0])) {
        PyErr_Format(PyExc_ValueError, "%zd elements cannot be written from element %zd on", length, at);
        return NULL;
    }
    memmove(target + at * WIDTH, source + start, (size_t)(stop - start));
    Py_RETURN_NONE;
}

static PyObject *as_bytes(PyObject *module, PyObject *const *args, Py_ssize_t num_args) {
    Py_ssize_t num_bytes;
    const char *part = read_part(args, num_args, &num_bytes);
    (void)module;
    return part == NULL ? NULL : PyBytes_FromStringAndSize(part, num_bytes);
}

static PyObject *num_common(PyObject *module, PyObject *const *args, Py_ssize_t num_args) {
    (void)module;
    if (!has_arguments(num_args, 2)) return NULL;
    if (!PyBytes_Check(args[0]) || !PyBytes_Check(args[1])) {
        PyErr_Format(PyExc_TypeError, "expected two strings of bytes, got %R and %R", args[0], args[1]);
        return NULL;
    }
    const char *left = PyBytes_AS_STRING(args[0]), *right = PyBytes_AS_STRING(args[1]);
    const Py_ssize_t of_left = PyBytes_GET_SIZE(args[0]), of_right = PyBytes_GET_SIZE(args[1]);
    const Py_ssize_t length = of_left < of_right ? of_left : of_right;
    Py_ssize_t common = 0;
    while (common < length && left[common] == right[common]) common++;
    return PyLong_FromSsize_t(common);
}

static PyObject *block_sums(PyObject *module, PyObject *const *args, Py_ssize_t num_args) {
    (void)module;
    if (!has_arguments(num_args, 2)) return NULL;
    const char *source = elements(args[0]);
    const Py_ssize_t blocks = source == NULL ? -1 : PyLong_AsSsize_t(args[1]);
    if (source == NULL || (blocks < 0 && PyErr_Occurred())) return NULL;
    const Py_ssize_t size = blocks > 0 ? PyArray_SIZE((PyArrayObject *)args[0]) / blocks : 0;
    if (size <= 0) {
        PyErr_Format(PyExc_ValueError, "%zd blocks cannot be made of these elements", blocks);
        return NULL;
    }
    PyObject *sums = PyBytes_FromStringAndSize(NULL, blocks * WIDTH);
    if (sums == NULL) return NULL;
    char *target = PyBytes_AS_STRING(sums);
    for (Py_ssize_t block = 0; block < blocks; block++) {
        uint32_t sum = 0;
        for (Py_ssize_t i = 0; i < size; i++, source += WIDTH) {
            uint32_t element;
            memcpy(&element, source, WIDTH);
            sum = sum * FACTOR + element;
        }
        memcpy(target + block * WIDTH, &sum, WIDTH);
    }
    return sums;
}

static PyMethodDef METHODS[] = {
    {"are_ids", are_ids, METH_O, "Whether an object is a one-dimensional array that has token ids, and needs no change."},
    {"copied", (PyCFunction)(void (*)(void))copied, METH_FASTCALL, "A new array of the elements start..stop of another."},
    {"put", (PyCFunction)(void (*)(void))put, METH_FASTCALL, "Writes the elements start..stop of an array into another."},
    {"as_bytes", (PyCFunction)(void (*)(void))as_bytes, METH_FASTCALL, "The bytes of the elements start..stop of an array."},
    {"num_common", (PyCFunction)(void (*)(void))num_common, METH_FASTCALL, "How many leading bytes two strings share."},
    {"block_sums", (PyCFunction)(void (*)(void))block_sums, METH_FASTCALL, "A checksum for each of so many blocks."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef MODULE = {PyModuleDef_HEAD_INIT, "_short_arrays", NULL, -1, METHODS, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__short_arrays(void) {
    import_array();
    return PyModule_Create(&MODULE);
}
