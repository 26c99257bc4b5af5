/* Makes one call of this process that changes a file go wrong: for crash_store.py, which compiles it, preloads it and
 * arms it in the process that writes. Python's own calls and those of the SQLite library come through here alike; only
 * files below the armed folder count. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

/* What happens at the armed call. The names are those of crash_store.Fault. */
enum fault {
    NONE,
    KILL,       /* the process is killed before the call */
    KILL_AFTER, /* ... after it; a write has then written a part only */
    EIO_ONCE,   /* the call fails */
    FULL_ONCE,  /* the call fails, if it could need space; else the next one that could */
    FULL,       /* ... and so do all after it that could */
    SHORT,      /* the next write writes a part only */
};

enum kind { WRITE, GROW, SYNC, OTHER };

static char folder[4096];
static int report = -1;
static enum fault fault = NONE;
static long at;
static unsigned part_of_256;
static atomic_long calls;
static atomic_int fired;

/* From now on: `fault` at call number `at` (from 1) that changes a file below `path`. */
void faults_arm(const char *path, int how, long number, unsigned part, int report_fd)
{
    snprintf(folder, sizeof folder, "%s/", path);
    at = number, part_of_256 = part, report = report_fd;
    atomic_store(&calls, 0), atomic_store(&fired, 0);
    fault = how;
}

long faults_calls(void)
{
    return atomic_load(&calls);
}

static void say(const char *call, const char *path)
{
    char line[4300];
    int length = snprintf(line, sizeof line, "{\"fault\": \"%s\", \"file\": \"%s\"}\n", call, path + strlen(folder));
    syscall(SYS_write, report, line, (size_t)length);
}

static void die(const char *call, const char *path)
{
    say(call, path);
    syscall(SYS_kill, getpid(), SIGKILL);
}

/* The path of an open file, if it is one of ours. */
static int is_ours(int fd, char *path, size_t size)
{
    char link[64];
    if (!*folder || fd == report) return 0;
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, path, size - 1);
    if (length < 0) return 0;
    path[length] = 0;
    return !strncmp(path, folder, strlen(folder));
}

static int fails(int error, const char *call, const char *path)
{
    if (!atomic_exchange(&fired, 1)) say(call, path);
    errno = error;
    return 1;
}

/* Counts the call. True if it is to fail; errno is set then. */
static int count(enum kind kind, const char *call, const char *path)
{
    long number = atomic_fetch_add(&calls, 1) + 1;
    int needs_space = kind == WRITE || kind == GROW;
    if (fault == NONE || number < at) return 0;
    if (fault == KILL) die(call, path);
    if (fault == EIO_ONCE && number == at) return fails(EIO, call, path);
    if (fault == FULL_ONCE && needs_space && !atomic_load(&fired)) return fails(ENOSPC, call, path);
    if (fault == FULL && needs_space) return fails(ENOSPC, call, path);
    return 0;
}

static void after(const char *call, const char *path)
{
    if (fault == KILL_AFTER && atomic_load(&calls) >= at) die(call, path);
}

/* How many bytes of a write are written. */
static size_t shorten(size_t bytes, const char *path)
{
    size_t part = bytes * part_of_256 / 256;
    if (fault == KILL_AFTER && atomic_load(&calls) >= at) return part;
    if (fault != SHORT || atomic_load(&calls) < at || !part || atomic_exchange(&fired, 1)) return bytes;
    say("short write", path);
    return part;
}

#define REAL(result, name, ...)                                   \
    static result (*real)(__VA_ARGS__);                           \
    if (!real) real = (result(*)(__VA_ARGS__))dlsym(RTLD_NEXT, #name)

#define POSITIONAL_WRITE(name)                                                \
    ssize_t name(int fd, const void *data, size_t bytes, off_t offset)        \
    {                                                                         \
        REAL(ssize_t, name, int, const void *, size_t, off_t);                \
        char path[4096];                                                      \
        if (!is_ours(fd, path, sizeof path)) return real(fd, data, bytes, offset); \
        if (count(WRITE, "write", path)) return -1;                           \
        ssize_t written = real(fd, data, shorten(bytes, path), offset);       \
        after("write", path);                                                 \
        return written;                                                       \
    }
POSITIONAL_WRITE(pwrite)
POSITIONAL_WRITE(pwrite64)

ssize_t write(int fd, const void *data, size_t bytes)
{
    REAL(ssize_t, write, int, const void *, size_t);
    char path[4096];
    if (!is_ours(fd, path, sizeof path)) return real(fd, data, bytes);
    if (count(WRITE, "write", path)) return -1;
    ssize_t written = real(fd, data, shorten(bytes, path));
    after("write", path);
    return written;
}

#define TRUNCATE(name)                                                        \
    int name(int fd, off_t size)                                              \
    {                                                                         \
        REAL(int, name, int, off_t);                                          \
        char path[4096];                                                      \
        struct stat now;                                                      \
        if (!is_ours(fd, path, sizeof path)) return real(fd, size);           \
        enum kind kind = !fstat(fd, &now) && size > now.st_size ? GROW : OTHER; \
        if (count(kind, "truncate", path)) return -1;                         \
        int result = real(fd, size);                                          \
        after("truncate", path);                                              \
        return result;                                                        \
    }
TRUNCATE(ftruncate)
TRUNCATE(ftruncate64)

#define SYNC_CALL(name)                                                       \
    int name(int fd)                                                          \
    {                                                                         \
        REAL(int, name, int);                                                 \
        char path[4096];                                                      \
        if (!is_ours(fd, path, sizeof path)) return real(fd);                 \
        if (count(SYNC, "sync", path)) return -1;                             \
        int result = real(fd);                                                \
        after("sync", path);                                                  \
        return result;                                                        \
    }
SYNC_CALL(fsync)
SYNC_CALL(fdatasync)

static int is_named_ours(const char *path)
{
    return *folder && !strncmp(path, folder, strlen(folder));
}

#define OPEN(name)                                                            \
    int name(const char *path, int flags, ...)                                \
    {                                                                         \
        REAL(int, name, const char *, int, ...);                              \
        va_list list;                                                         \
        va_start(list, flags);                                                \
        mode_t mode = flags & O_CREAT ? va_arg(list, mode_t) : 0;             \
        va_end(list);                                                         \
        int creates = flags & O_CREAT && access(path, F_OK);                  \
        if (!creates || !is_named_ours(path)) return real(path, flags, mode); \
        if (count(GROW, "create", path)) return -1;                           \
        int fd = real(path, flags, mode);                                     \
        after("create", path);                                                \
        return fd;                                                            \
    }
OPEN(open)
OPEN(open64)

int rename(const char *from, const char *to)
{
    REAL(int, rename, const char *, const char *);
    if (!is_named_ours(to)) return real(from, to);
    if (count(GROW, "rename", to)) return -1;
    int result = real(from, to);
    after("rename", to);
    return result;
}

int unlink(const char *path)
{
    REAL(int, unlink, const char *);
    if (!is_named_ours(path)) return real(path);
    if (count(OTHER, "unlink", path)) return -1;
    int result = real(path);
    after("unlink", path);
    return result;
}

int mkdir(const char *path, mode_t mode)
{
    REAL(int, mkdir, const char *, mode_t);
    if (!is_named_ours(path) || !access(path, F_OK)) return real(path, mode);
    if (count(GROW, "mkdir", path)) return -1;
    int result = real(path, mode);
    after("mkdir", path);
    return result;
}
