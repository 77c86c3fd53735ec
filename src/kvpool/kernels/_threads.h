/* Work that is divided between threads. */

#include <pthread.h>

#define MOST_THREADS 256

typedef struct {
    void (*work)(const void *job, long first, long last);
    const void *job;
    long first, last;
} Share;

static long smaller(long a, long b) { return a < b ? a : b; }

static void *do_share(void *given) {
    const Share *share = given;
    share->work(share->job, share->first, share->last);
    return NULL;
}

/* Does `count` parts of a job, in as many threads as are given, have a part each, and are worth it. */
static void in_threads(void (*work)(const void *, long, long), const void *job, long count, double worth, long threads) {
    threads = smaller(smaller(threads, MOST_THREADS), count);
    threads = worth < (double)threads ? (long)worth : threads;
    threads = threads < 1 ? 1 : threads;
    Share shares[MOST_THREADS];
    pthread_t others[MOST_THREADS];
    int started[MOST_THREADS] = {0};
    for (long i = 0; i < threads; i++) shares[i] = (Share){work, job, count * i / threads, count * (i + 1) / threads};
    for (long i = 1; i < threads; i++) started[i] = pthread_create(&others[i], NULL, do_share, &shares[i]) == 0;
    for (long i = 0; i < threads; i++)
        if (!started[i]) do_share(&shares[i]);
    for (long i = 1; i < threads; i++)
        if (started[i]) pthread_join(others[i], NULL);
}
