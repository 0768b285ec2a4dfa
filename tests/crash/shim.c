// Preloaded into a process (LD_PRELOAD), sees every libc call that changes the disk below one folder: numbers
// it, logs it with its data, and at a given number kills the process before the call takes effect, or makes
// the call fail.
//
// fsync is not carried out unless asked for: killing a process loses nothing that the kernel has, and what a
// loss of power takes is rebuilt from the log.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

enum { RECORD, KILL, TEAR, FAIL, SHORTEN };

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static char root[PATH_MAX];
static size_t root_length;
static int armed, mode, code, log_fd = -1, really_sync;
static long at, count;

// mode: what happens at call number `where` (from 0). `log`: a descriptor that takes the log, or -1.
void crash_arm(const char* folder, int what, long where, int error, int log, int sync) {
  pthread_mutex_lock(&lock);
  snprintf(root, sizeof root, "%s", folder);
  root_length = strlen(root);
  mode = what, at = where, code = error, log_fd = log, really_sync = sync, count = 0;
  armed = 1;
  pthread_mutex_unlock(&lock);
}

// How many calls there were.
long crash_disarm(void) {
  pthread_mutex_lock(&lock);
  armed = 0;
  pthread_mutex_unlock(&lock);
  return count;
}

static int below(const char* path) {
  return strncmp(path, root, root_length) == 0 && (path[root_length] == '/' || path[root_length] == 0);
}

static void of_fd(int fd, char* path) {
  char link[64];
  snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
  ssize_t n = readlink(link, path, PATH_MAX - 1);
  path[n > 0 ? n : 0] = 0;
}

static void of_name(int folder, const char* name, char* path) {
  if (name[0] == '/') {
    snprintf(path, PATH_MAX, "%s", name);
    return;
  }
  char start[PATH_MAX];
  if (folder == AT_FDCWD) {
    if (!getcwd(start, sizeof start)) start[0] = 0;
  } else {
    of_fd(folder, start);
  }
  if (snprintf(path, PATH_MAX, "%s/%s", start, name) >= PATH_MAX) abort();
}

static const char* shown(const char* path) { return path[root_length] ? path + root_length + 1 : "."; }

static unsigned long number_of(const char* path) {
  struct stat info;
  return lstat(path, &info) == 0 ? info.st_ino : 0;
}

// One call that is being counted. `fate` says what to do with it.
struct call {
  const char* name;
  char path[PATH_MAX], other[PATH_MAX];
  enum { DO, REFUSE, HALVE, HALVE_AND_DIE } fate;
};

// Take the lock and number the call; 0 when it is none of ours (then the lock is not held).
static int enter(struct call* call) {
  pthread_mutex_lock(&lock);
  if (!armed || !(below(call->path) || (call->other[0] && below(call->other)))) {
    pthread_mutex_unlock(&lock);
    return 0;
  }
  const long number = count++;
  const int writes = strcmp(call->name, "write") == 0;
  call->fate = DO;
  if (number == at) {
    if (mode == KILL || (mode == TEAR && !writes)) {
      syscall(SYS_kill, getpid(), SIGKILL);
      for (;;) pause();
    }
    if (mode == TEAR) call->fate = HALVE_AND_DIE;
    if (mode == FAIL) call->fate = REFUSE;
    if (mode == SHORTEN && writes) call->fate = HALVE;
  }
  return 1;
}

static void put(const void* data, size_t size) {
  const char* from = data;
  while (size > 0) {
    ssize_t n = syscall(SYS_write, log_fd, from, size);
    if (n <= 0) abort();
    from += n, size -= (size_t)n;
  }
}

static long leave(struct call* call, unsigned long ino, long long offset, const void* data, long result) {
  const int error = errno;
  if (log_fd >= 0) {
    char line[3 * PATH_MAX];
    const long size = data && result > 0 ? result : 0;
    const int n =
        snprintf(line, sizeof line, "%s\t%lu\t%s\t%s\t%lld\t%ld\t%ld\n", call->name, ino, shown(call->path),
                 call->other[0] ? shown(call->other) : "", offset, result < 0 ? -(long)error : result, size);
    put(line, (size_t)n);
    if (size) put(data, (size_t)size);
  }
  if (call->fate == HALVE_AND_DIE) {
    syscall(SYS_kill, getpid(), SIGKILL);
    for (;;) pause();
  }
  pthread_mutex_unlock(&lock);
  errno = error;
  return result;
}

#define REAL(name) ((__typeof__(&name))real(#name))
static void* real(const char* name) {
  void* found = dlsym(RTLD_NEXT, name);
  if (!found) abort();
  return found;
}

static long refuse(void) {
  errno = code;
  return -1;
}

static int do_open(int folder, const char* name, int flags, mode_t bits) {
  int (*open_)(int, const char*, int, ...) = REAL(openat);
  struct call call = {.name = "create"};
  if (armed && (flags & (O_CREAT | O_TRUNC))) of_name(folder, name, call.path);
  if (!call.path[0] || !enter(&call)) return open_(folder, name, flags, bits);
  const int existed = number_of(call.path) != 0;
  if (existed && !(flags & O_TRUNC) && !(flags & O_EXCL)) call.name = "open";
  const int fd = call.fate == REFUSE ? (int)refuse() : open_(folder, name, flags, bits);
  return (int)leave(&call, fd >= 0 ? number_of(call.path) : 0, 0, NULL, fd);
}

#define MODE_OF(flags, bits)               \
  mode_t bits = 0;                         \
  if ((flags) & O_CREAT) {                 \
    va_list more;                          \
    va_start(more, flags);                 \
    bits = (mode_t)va_arg(more, unsigned); \
    va_end(more);                          \
  }

int open(const char* name, int flags, ...) {
  MODE_OF(flags, bits)
  return do_open(AT_FDCWD, name, flags, bits);
}
int open64(const char* name, int flags, ...) {
  MODE_OF(flags, bits)
  return do_open(AT_FDCWD, name, flags, bits);
}
int openat(int folder, const char* name, int flags, ...) {
  MODE_OF(flags, bits)
  return do_open(folder, name, flags, bits);
}
int openat64(int folder, const char* name, int flags, ...) {
  MODE_OF(flags, bits)
  return do_open(folder, name, flags, bits);
}

// offset < 0: at the descriptor's own position.
static ssize_t do_write(int fd, const void* data, size_t size, off_t offset) {
  ssize_t (*pwrite_)(int, const void*, size_t, off_t) = REAL(pwrite64);
  ssize_t (*write_)(int, const void*, size_t) = REAL(write);
  struct call call = {.name = "write"};
  if (armed) of_fd(fd, call.path);
  if (!call.path[0] || !enter(&call))
    return offset < 0 ? write_(fd, data, size) : pwrite_(fd, data, size, offset);
  struct stat info = {0};
  fstat(fd, &info);
  const off_t where = offset < 0 ? lseek(fd, 0, SEEK_CUR) : offset;
  if ((call.fate == HALVE || call.fate == HALVE_AND_DIE) && size > 1) {
    size = size > 4096 ? size / 2 / 4096 * 4096 + (size < 8192 ? 4096 : 0) : size / 2;
  }
  ssize_t n;
  if (call.fate == REFUSE) {
    n = refuse();
  } else {
    n = offset < 0 ? write_(fd, data, size) : pwrite_(fd, data, size, offset);
  }
  return leave(&call, info.st_ino, where, data, n);
}

ssize_t write(int fd, const void* data, size_t size) { return do_write(fd, data, size, -1); }
ssize_t pwrite(int fd, const void* data, size_t size, off_t offset) {
  return do_write(fd, data, size, offset);
}
ssize_t pwrite64(int fd, const void* data, size_t size, off64_t offset) {
  return do_write(fd, data, size, offset);
}

static int do_truncate(int fd, off_t size) {
  int (*truncate_)(int, off_t) = REAL(ftruncate64);
  struct call call = {.name = "truncate"};
  if (armed) of_fd(fd, call.path);
  if (!call.path[0] || !enter(&call)) return truncate_(fd, size);
  struct stat info = {0};
  fstat(fd, &info);
  return (int)leave(&call, info.st_ino, size, NULL, call.fate == REFUSE ? refuse() : truncate_(fd, size));
}

int ftruncate(int fd, off_t size) { return do_truncate(fd, size); }
int ftruncate64(int fd, off64_t size) { return do_truncate(fd, size); }

// fallocate() of the beginning of a file, which then has at least that size.
static int do_allocate(int fd, int how, off_t start, off_t size) {
  int (*allocate_)(int, int, off_t, off_t) = REAL(fallocate64);
  struct call call = {.name = "allocate"};
  if (armed) of_fd(fd, call.path);
  if (!call.path[0] || !enter(&call)) return allocate_(fd, how, start, size);
  if (how != 0) abort();  // the model of losses knows no other kind
  struct stat info = {0};
  fstat(fd, &info);
  const long result = call.fate == REFUSE ? refuse() : allocate_(fd, how, start, size);
  return (int)leave(&call, info.st_ino, start + size, NULL, result);
}

int fallocate(int fd, int how, off_t start, off_t size) { return do_allocate(fd, how, start, size); }
int fallocate64(int fd, int how, off64_t start, off64_t size) { return do_allocate(fd, how, start, size); }

static int do_sync(int fd, int (*sync_)(int)) {
  struct call call = {.name = "fsync"};
  if (armed) of_fd(fd, call.path);
  if (!call.path[0] || !enter(&call)) return sync_(fd);
  struct stat info = {0};
  fstat(fd, &info);
  const long result = call.fate == REFUSE ? refuse() : really_sync ? sync_(fd) : 0;
  return (int)leave(&call, info.st_ino, 0, NULL, result);
}

int fsync(int fd) { return do_sync(fd, REAL(fsync)); }
int fdatasync(int fd) { return do_sync(fd, REAL(fdatasync)); }

// Closing changes nothing, but may tell of a write that has failed.
int close(int fd) {
  int (*close_)(int) = REAL(close);
  struct call call = {.name = "close"};
  if (armed && (fcntl(fd, F_GETFL) & O_ACCMODE) != O_RDONLY) of_fd(fd, call.path);
  if (!call.path[0] || !enter(&call)) return close_(fd);
  long result = close_(fd);
  if (call.fate == REFUSE) result = refuse();
  return (int)leave(&call, 0, 0, NULL, result);
}

static int do_link(const char* name, int from, const char* old, int to, const char* new, unsigned flags) {
  struct call call = {.name = name};
  const int links = name[0] == 'l';
  if (armed) of_name(from, old, call.path), of_name(to, new, call.other);
  const int counted = call.path[0] && enter(&call);
  const unsigned long ino = counted ? number_of(call.path) : 0;
  long result;
  if (counted && call.fate == REFUSE) {
    result = refuse();
  } else if (links) {
    result = REAL(linkat)(from, old, to, new, (int)flags);
  } else {
    result = REAL(renameat2)(from, old, to, new, flags);
  }
  return counted ? (int)leave(&call, ino, 0, NULL, result) : (int)result;
}

int link(const char* old, const char* new) { return do_link("link", AT_FDCWD, old, AT_FDCWD, new, 0); }
int linkat(int from, const char* old, int to, const char* new, int flags) {
  return do_link("link", from, old, to, new, (unsigned)flags);
}
int rename(const char* old, const char* new) { return do_link("rename", AT_FDCWD, old, AT_FDCWD, new, 0); }
int renameat(int from, const char* old, int to, const char* new) {
  return do_link("rename", from, old, to, new, 0);
}
int renameat2(int from, const char* old, int to, const char* new, unsigned flags) {
  return do_link("rename", from, old, to, new, flags);
}

static int do_unlink(int folder, const char* name, int flags) {
  int (*unlink_)(int, const char*, int) = REAL(unlinkat);
  struct call call = {.name = flags & AT_REMOVEDIR ? "rmdir" : "unlink"};
  if (armed) of_name(folder, name, call.path);
  if (!call.path[0] || !enter(&call)) return unlink_(folder, name, flags);
  return (int)leave(&call, number_of(call.path), 0, NULL,
                    call.fate == REFUSE ? refuse() : unlink_(folder, name, flags));
}

int unlink(const char* name) { return do_unlink(AT_FDCWD, name, 0); }
int unlinkat(int folder, const char* name, int flags) { return do_unlink(folder, name, flags); }
int rmdir(const char* name) { return do_unlink(AT_FDCWD, name, AT_REMOVEDIR); }

static int do_mkdir(int folder, const char* name, mode_t bits) {
  int (*mkdir_)(int, const char*, mode_t) = REAL(mkdirat);
  struct call call = {.name = "mkdir"};
  if (armed) of_name(folder, name, call.path);
  if (!call.path[0] || !enter(&call)) return mkdir_(folder, name, bits);
  const int result = call.fate == REFUSE ? (int)refuse() : mkdir_(folder, name, bits);
  return (int)leave(&call, result == 0 ? number_of(call.path) : 0, 0, NULL, result);
}

int mkdir(const char* name, mode_t bits) { return do_mkdir(AT_FDCWD, name, bits); }
int mkdirat(int folder, const char* name, mode_t bits) { return do_mkdir(folder, name, bits); }
