/* One call of `attend`, as a program: reads its arguments from standard input, writes the results to standard output.

   `emulated_attention.py` compiles it for another processor and runs it in an emulator, where there is no Python. It writes
   arrays one after another, each behind its number of bytes, in the order in which `main` takes them. */

#include "_paged_attention.c"

#include <stdio.h>

static void *taken(size_t *size) {
    int64_t given;
    if (fread(&given, sizeof given, 1, stdin) != 1) exit(2);
    void *memory = malloc((size_t)given + 1);
    if (memory == NULL || fread(memory, 1, (size_t)given, stdin) != (size_t)given) exit(2);
    if (size != NULL) *size = (size_t)given;
    return given == 0 ? NULL : memory;
}

static Packed packed(const int64_t *numbers, char *data) { return (Packed){data, (int)numbers[0], numbers[1], numbers[2]}; }

static Stored stored(const int64_t *numbers, const char *data, const uint16_t *scales) {
    return (Stored){data,   (int)numbers[0], numbers[1], numbers[2], numbers[3],
                    scales, numbers[4],      numbers[5], numbers[6]};
}

int main(void) {
    size_t out_size, pieces_size, merges_size;
    const int64_t *numbers = taken(NULL); /* of q, out, k, v, the shape, partial results and threads */
    const int64_t *shape = numbers + 20;
    const float *scores = taken(NULL);
    Layer layer = {.scale = scores[0], .soft_cap = scores[1]};
    layer.q = packed(numbers, taken(NULL));
    layer.out = packed(numbers + 3, taken(&out_size));
    const char *k = taken(NULL);
    layer.k = stored(numbers + 6, k, taken(NULL));
    const char *v = taken(NULL);
    layer.v = stored(numbers + 13, v, taken(NULL));
    layer.sink_logits = taken(NULL), layer.indices = taken(NULL), layer.queries = taken(NULL);
    layer.pieces = taken(&pieces_size);
    const Merge *merges = taken(&merges_size);
    layer.q_heads = shape[0], layer.kv_heads = shape[1], layer.group = shape[0] / shape[1];
    layer.head_dim = shape[2], layer.v_dim = shape[3], layer.block_size = shape[4];
    layer.sink_tokens = shape[5], layer.sink_slots = shape[6], layer.num_partials = shape[7];
    layer.num_pieces = (Py_ssize_t)(pieces_size / sizeof(Piece));
    Choice found[3];
    choices(found);
    if (!attend_and_merge(found[0].kernel, &layer, merges, (Py_ssize_t)(merges_size / sizeof(Merge)), (long)shape[8]))
        return 3;
    return fwrite(layer.out.data, 1, out_size, stdout) == out_size ? 0 : 4;
}
