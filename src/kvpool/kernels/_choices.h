/* The instruction sets that a processor can run, for C code that has a `Kernel` for each. */

#define MOST_CHOICES 3

typedef struct {
    const char *name;
    const Kernel *kernel;
} Choice;

/* What this processor can run, the best first. */
static int choices(Choice *found) {
    int count = 0;
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
        __builtin_cpu_supports("avx512vl"))
        found[count++] = (Choice){"avx512", &kernel_avx512};
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) found[count++] = (Choice){"avx2", &kernel_avx2};
    found[count++] = (Choice){"sse", &kernel_plain};
#elif defined(__aarch64__)
    found[count++] = (Choice){"neon", &kernel_plain};
#else
    found[count++] = (Choice){"portable", &kernel_plain};
#endif
    return count;
}

/* The kernel of that name; NULL with an exception where there is none. */
static const Kernel *kernel_named(const char *name) {
    Choice found[MOST_CHOICES];
    const int count = choices(found);
    for (int i = 0; i < count; i++)
        if (strcmp(found[i].name, name) == 0) return found[i].kernel;
    PyErr_Format(PyExc_ValueError, "this processor has no instructions named %s", name);
    return NULL;
}

static PyObject *instructions(PyObject *module, PyObject *unused) {
    (void)module, (void)unused;
    Choice found[MOST_CHOICES];
    const int count = choices(found);
    PyObject *names = PyTuple_New(count);
    for (int i = 0; names != NULL && i < count; i++) {
        PyObject *name = PyUnicode_FromString(found[i].name);
        if (name == NULL)
            Py_CLEAR(names);
        else
            PyTuple_SET_ITEM(names, i, name);
    }
    return names;
}
