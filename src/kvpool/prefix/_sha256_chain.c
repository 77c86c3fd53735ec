/* hash_run(parent, tokens, block_bytes): the digests of a run of blocks, each SHA-256(digest before it + its bytes).

   `digests.py` does the same with hashlib, where each block costs the making, copying and ending of a hash: seven times
   what the two compressions of a block of 16 tokens take with the processor's own instructions for SHA-256. This module is
   for processors that have them; on others its import fails, and hashlib is used. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <string.h>

#define DIGEST_BYTES 32
#define CHUNK_BYTES 64 /* what one compression takes */

static const uint32_t START[8] = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                                  0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};

static const uint32_t ROUNDS[64] = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};

#if defined(__aarch64__) && (defined(__APPLE__) || defined(__linux__))

#include <arm_neon.h>
#ifdef __APPLE__
#define WITH_SHA256
static int has_instructions(void) { return 1; }
#else
#include <sys/auxv.h>
#define WITH_SHA256 __attribute__((target("+crypto")))
static int has_instructions(void) { return (getauxval(AT_HWCAP) >> 6 & 1) != 0; } /* HWCAP_SHA2 */
#endif

WITH_SHA256 static void compress(uint32_t state[8], const uint8_t *chunk) {
    uint32x4_t abcd = vld1q_u32(state), efgh = vld1q_u32(state + 4), words[4];
    const uint32x4_t abcd_before = abcd, efgh_before = efgh;
    for (int i = 0; i < 4; i++) words[i] = vreinterpretq_u32_u8(vrev32q_u8(vld1q_u8(chunk + 16 * i)));
#pragma GCC unroll 16
    for (int i = 0; i < 16; i++) {
        const uint32x4_t added = vaddq_u32(words[i & 3], vld1q_u32(ROUNDS + 4 * i)), abcd_old = abcd;
        if (i < 12) {
            const uint32x4_t half = vsha256su0q_u32(words[i & 3], words[(i + 1) & 3]);
            words[i & 3] = vsha256su1q_u32(half, words[(i + 2) & 3], words[(i + 3) & 3]);
        }
        abcd = vsha256hq_u32(abcd, efgh, added);
        efgh = vsha256h2q_u32(efgh, abcd_old, added);
    }
    vst1q_u32(state, vaddq_u32(abcd, abcd_before));
    vst1q_u32(state + 4, vaddq_u32(efgh, efgh_before));
}

#elif defined(__x86_64__) && defined(__GNUC__)

#include <cpuid.h>
#include <immintrin.h>
static int has_instructions(void) {
    unsigned int a, b, c, d;
    return __builtin_cpu_supports("sse4.1") && __get_cpuid_count(7, 0, &a, &b, &c, &d) && (b >> 29 & 1);
}

#define LOAD(p) _mm_loadu_si128((const __m128i *)(p))
#define STORE(p, v) _mm_storeu_si128((__m128i *)(p), (v))

__attribute__((target("sha,sse4.1"))) static void compress(uint32_t state[8], const uint8_t *chunk) {
    const __m128i big_endian = _mm_set_epi64x(0x0c0d0e0f08090a0bLL, 0x0405060700010203LL);
    const __m128i cdab = _mm_shuffle_epi32(LOAD(state), 0xB1), efgh = _mm_shuffle_epi32(LOAD(state + 4), 0x1B);
    __m128i abef = _mm_alignr_epi8(cdab, efgh, 8), cdgh = _mm_blend_epi16(efgh, cdab, 0xF0), words[4];
    const __m128i abef_before = abef, cdgh_before = cdgh;
    for (int i = 0; i < 4; i++) words[i] = _mm_shuffle_epi8(LOAD(chunk + 16 * i), big_endian);
#pragma GCC unroll 16
    for (int i = 0; i < 16; i++) {
        const __m128i added = _mm_add_epi32(words[i & 3], LOAD(ROUNDS + 4 * i));
        if (i < 12) {
            const __m128i half = _mm_sha256msg1_epu32(words[i & 3], words[(i + 1) & 3]);
            const __m128i later = _mm_alignr_epi8(words[(i + 3) & 3], words[(i + 2) & 3], 4);
            words[i & 3] = _mm_sha256msg2_epu32(_mm_add_epi32(half, later), words[(i + 3) & 3]);
        }
        cdgh = _mm_sha256rnds2_epu32(cdgh, abef, added);
        abef = _mm_sha256rnds2_epu32(abef, cdgh, _mm_shuffle_epi32(added, 0x0E));
    }
    const __m128i feba = _mm_shuffle_epi32(_mm_add_epi32(abef, abef_before), 0x1B);
    const __m128i dchg = _mm_shuffle_epi32(_mm_add_epi32(cdgh, cdgh_before), 0xB1);
    STORE(state, _mm_blend_epi16(feba, dchg, 0xF0));
    STORE(state + 4, _mm_alignr_epi8(dchg, feba, 8));
}

#else

static int has_instructions(void) { return 0; }
static void compress(uint32_t state[8], const uint8_t *chunk) { (void)state, (void)chunk; }

#endif

static void put_big_endian(uint8_t *out, uint64_t value, int num_bytes) {
    for (int i = num_bytes - 1; i >= 0; i--, value >>= 8) out[i] = (uint8_t)value;
}

/* The message of each block has the same place, the same length and therefore the same padding: 1, zeros, its bits. */
static PyObject *hash_blocks(const uint8_t *parent, const uint8_t *blocks, Py_ssize_t num_blocks, Py_ssize_t block_bytes) {
    const Py_ssize_t length = DIGEST_BYTES + block_bytes;
    const Py_ssize_t padded = (length + 9 + CHUNK_BYTES - 1) / CHUNK_BYTES * CHUNK_BYTES;
    uint8_t *message = PyMem_Calloc(1, (size_t)padded);
    PyObject *digests = message == NULL ? PyErr_NoMemory() : PyList_New(num_blocks);
    if (digests == NULL) {
        PyMem_Free(message);
        return NULL;
    }
    memcpy(message, parent, DIGEST_BYTES);
    message[length] = 0x80;
    put_big_endian(message + padded - 8, (uint64_t)length * 8, 8);
    for (Py_ssize_t i = 0; i < num_blocks; i++) {
        uint32_t state[8];
        memcpy(state, START, sizeof state);
        memcpy(message + DIGEST_BYTES, blocks + i * block_bytes, (size_t)block_bytes);
        for (Py_ssize_t at = 0; at < padded; at += CHUNK_BYTES) compress(state, message + at);
        for (int word = 0; word < 8; word++) put_big_endian(message + 4 * word, state[word], 4);
        PyObject *digest = PyBytes_FromStringAndSize((const char *)message, DIGEST_BYTES);
        if (digest == NULL) {
            Py_CLEAR(digests);
            break;
        }
        PyList_SET_ITEM(digests, i, digest);
    }
    PyMem_Free(message);
    return digests;
}

static PyObject *hash_run(PyObject *module, PyObject *args) {
    Py_buffer parent, tokens;
    Py_ssize_t block_bytes;
    (void)module;
    if (!PyArg_ParseTuple(args, "y*y*n", &parent, &tokens, &block_bytes)) return NULL;
    PyObject *digests = NULL;
    if (parent.len != DIGEST_BYTES || block_bytes < 1 || tokens.len % block_bytes)
        PyErr_SetString(PyExc_ValueError, "a run follows a digest of 32 bytes and has whole blocks");
    else
        digests = hash_blocks(parent.buf, tokens.buf, tokens.len / block_bytes, block_bytes);
    PyBuffer_Release(&tokens);
    PyBuffer_Release(&parent);
    return digests;
}

static PyMethodDef METHODS[] = {
    {"hash_run", hash_run, METH_VARARGS, "The chained SHA-256 digests of consecutive blocks."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef MODULE = {PyModuleDef_HEAD_INIT, "_sha256_chain", NULL, -1, METHODS, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__sha256_chain(void) {
    if (has_instructions()) return PyModule_Create(&MODULE);
    PyErr_SetString(PyExc_ImportError, "this processor has no instructions for SHA-256");
    return NULL;
}
