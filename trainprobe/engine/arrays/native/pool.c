/* A few threads that reduce blocks, asleep between tensors. One tensor at a time; whoever finds the pool busy reduces
   alone. After a fork the child has no threads: it makes its own when it needs them. */
#include <stdlib.h>

#include "reduce.h"

#if defined(_WIN32)
int pool_run(const Job *job, int64_t blocks, Part *parts) {
    (void)job, (void)blocks, (void)parts;
    return 0;
}
void pool_threads(int n) { (void)n; }
int pool_size(void) { return 1; }
void pool_init(void) {}
#else
#include <pthread.h>
#include <signal.h>

#define MOST 64

static pthread_mutex_t busy = PTHREAD_MUTEX_INITIALIZER, lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t wake = PTHREAD_COND_INITIALIZER, done = PTHREAD_COND_INITIALIZER;
static int wanted = 1, helpers, active;
static uint64_t generation;
static const Job *current;
static Part *results;
static int64_t total;
static int64_t next_block;

static void work(const Job *job, Part *parts, int64_t blocks) {
    for (;;) {
        int64_t block = __atomic_fetch_add(&next_block, 1, __ATOMIC_RELAXED);
        if (block >= blocks) return;
        reduce_block(job, block, &parts[block]);
    }
}

static void *helper(void *number) {
    int64_t me = (int64_t)(intptr_t)number;
    uint64_t seen = 0;
    pthread_mutex_lock(&lock);
    for (;;) {
        while (generation == seen || !current) {
            seen = generation;
            pthread_cond_wait(&wake, &lock);
        }
        seen = generation;
        if (me >= wanted - 1) continue;
        const Job *job = current;
        Part *parts = results;
        int64_t blocks = total;
        active++;
        pthread_mutex_unlock(&lock);
        work(job, parts, blocks);
        pthread_mutex_lock(&lock);
        if (--active == 0) pthread_cond_signal(&done);
    }
    return NULL;
}

static void start_helpers(void) {
    pthread_attr_t attributes;
    sigset_t all, before;
    if (helpers >= wanted - 1) return;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before); /* signals belong to the threads of the program */
    pthread_attr_init(&attributes);
    pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
    pthread_attr_setstacksize(&attributes, 1 << 20);
    while (helpers < wanted - 1) {
        pthread_t thread;
        if (pthread_create(&thread, &attributes, helper, (void *)(intptr_t)helpers)) break;
        helpers++;
    }
    pthread_attr_destroy(&attributes);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
}

int pool_run(const Job *job, int64_t blocks, Part *parts) {
    if (wanted < 2 || blocks < 2 || pthread_mutex_trylock(&busy)) return 0;
    pthread_mutex_lock(&lock);
    start_helpers();
    current = job, results = parts, total = blocks;
    __atomic_store_n(&next_block, 0, __ATOMIC_RELAXED);
    generation++;
    pthread_cond_broadcast(&wake);
    pthread_mutex_unlock(&lock);
    work(job, parts, blocks);
    pthread_mutex_lock(&lock);
    current = NULL; /* a helper that wakes from now on finds nothing */
    while (active) pthread_cond_wait(&done, &lock);
    pthread_mutex_unlock(&lock);
    pthread_mutex_unlock(&busy);
    return 1;
}

void pool_threads(int n) {
    pthread_mutex_lock(&lock);
    wanted = n < 1 ? 1 : n > MOST ? MOST : n;
    pthread_mutex_unlock(&lock);
}

int pool_size(void) { return wanted; }

static void in_child(void) {
    pthread_mutex_init(&busy, NULL);
    pthread_mutex_init(&lock, NULL);
    pthread_cond_init(&wake, NULL);
    pthread_cond_init(&done, NULL);
    helpers = active = 0;
    current = NULL;
}

void pool_init(void) { pthread_atfork(NULL, NULL, in_child); }
#endif
