#include "server-page-os.h"

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstring>

#include <dirent.h>
#include <fcntl.h>
#include <sched.h>
#include <sys/file.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

typedef server_page_os_result result;
typedef server_page_os_path   path;

static result failed(const char * verb, const path & p, int error) {
    result res;

    switch (error) {
        case ENOENT: res.status = SERVER_PAGE_OS_NOT_FOUND; break;
        case ENOSPC:
        case EDQUOT:
        case EFBIG:  res.status = SERVER_PAGE_OS_NO_SPACE;  break;
        case EACCES:
        case EPERM:
        case EROFS:  res.status = SERVER_PAGE_OS_NO_ACCESS; break;
        default:     res.status = SERVER_PAGE_OS_OTHER;
    }
    res.message = std::string(verb) + " " + p.str() + ": " + std::strerror(error);

    return res;
}

template <typename F> static auto again(const F & call) {
    auto res = call();
    while (res < 0 && errno == EINTR) {
        res = call();
    }
    return res;
}

struct fd_handle final : server_page_os_handle {
    explicit fd_handle(int fd) : fd(fd) {}

    // whatever close() says: what had to be durable was synced before; the caller may be about to tell of another error
    ~fd_handle() override {
        const int error = errno;
        close(fd);
        errno = error;
    }

    fd_handle(const fd_handle &) = delete;
    fd_handle & operator=(const fd_handle &) = delete;

    const int fd;
};

typedef std::unique_ptr<fd_handle> fd_ptr;

static fd_ptr wrapped(int fd) {
    return fd < 0 ? nullptr : std::make_unique<fd_handle>(fd);
}

static const int OPEN_DIR = O_RDONLY | O_DIRECTORY | O_CLOEXEC;

// nullptr: errno says why
static fd_ptr open_dir(const path & p) {
    fd_ptr dir = wrapped(again([&]() { return ::open(p.dir.c_str(), OPEN_DIR); }));

    for (size_t begin = 0; dir && begin < p.below.size(); ) {
        const size_t end  = std::min(p.below.find('/', begin), p.below.size());
        const auto   part = p.below.substr(begin, end - begin);

        auto next = wrapped(again([&]() { return openat(dir->fd, part.c_str(), OPEN_DIR | O_NOFOLLOW); }));

        // said of a symlink too, where it would send somebody looking for the wrong thing
        struct stat st;
        if (!next && errno == ENOTDIR) {
            const bool is_link = fstatat(dir->fd, part.c_str(), &st, AT_SYMLINK_NOFOLLOW) == 0 && S_ISLNK(st.st_mode);
            errno = is_link ? ELOOP : ENOTDIR;
        }
        dir   = std::move(next);
        begin = end + 1;
    }

    return dir;
}

// the directory of the last part, and that part
struct place {
    explicit place(const path & p) {
        const size_t slash = p.below.rfind('/');

        name = slash == std::string::npos ? p.below : p.below.substr(slash + 1);
        dir  = open_dir({ p.dir, slash == std::string::npos ? "" : p.below.substr(0, slash) });
    }

    fd_ptr      dir;
    std::string name;
};

static server_page_os_entry entry_of(const std::string & name, const struct stat & st) {
    server_page_os_entry res;
    res.name = name;
    res.kind = S_ISREG(st.st_mode) ? SERVER_PAGE_OS_FILE : S_ISDIR(st.st_mode) ? SERVER_PAGE_OS_DIR : SERVER_PAGE_OS_ALIEN;
    res.n_bytes = res.kind == SERVER_PAGE_OS_FILE ? st.st_size : 0;
    return res;
}

// A write past RLIMIT_FSIZE raises SIGXFSZ, which ends a process by default. Held back in this thread and taken out again,
// it leaves EFBIG, and whoever waits for the signal elsewhere still gets his own.
struct without_sigxfsz {
    without_sigxfsz() {
        sigemptyset(&only);
        sigaddset(&only, SIGXFSZ);
        was_pending = is_pending();
        pthread_sigmask(SIG_BLOCK, &only, &before);
    }

    ~without_sigxfsz() {
        if (!was_pending && is_pending()) {
            int signal = 0;
            sigwait(&only, &signal);
        }
        pthread_sigmask(SIG_SETMASK, &before, nullptr);
    }

private:
    static bool is_pending() {
        sigset_t pending;
        sigpending(&pending);
        return sigismember(&pending, SIGXFSZ) == 1;
    }

    sigset_t only;
    sigset_t before;
    bool     was_pending;
};

static int sync_fd(int fd) {
#ifdef F_FULLFSYNC // where there is this one, fsync() stops at the cache of the disk
    if (again([&]() { return fcntl(fd, F_FULLFSYNC); }) == 0) {
        return 0;
    }
#endif
    return again([&]() { return fsync(fd); });
}

// some systems take no more than 2 GiB in one call
static const size_t N_CALL_MAX = size_t(1) << 30;

struct server_page_os_posix final : server_page_os {
    uint64_t process_id() override {
        return getpid();
    }

    result make_dir(const path & p, bool & made) override {
        const place at(p);
        made = at.dir && mkdirat(at.dir->fd, at.name.c_str(), 0700) == 0;
        if (made) {
            return fchmodat(at.dir->fd, at.name.c_str(), 0700, 0) == 0 ? result() : failed("set the mode of", p, errno);
        }
        if (!at.dir || errno != EEXIST) {
            return failed("make directory", p, errno);
        }

        // a symlink to a directory is not one
        return open_dir(p) ? result() : failed("make directory", p, errno);
    }

    result list(const path & p, std::vector<server_page_os_entry> & entries) override {
        entries.clear();

        const auto fd = open_dir(p);
        if (!fd) {
            return failed("list", p, errno);
        }

        const int own = fcntl(fd->fd, F_DUPFD_CLOEXEC, 0); // closedir() closes it
        DIR * dir = own < 0 ? nullptr : fdopendir(own);
        if (!dir) {
            const int error = errno;
            if (own >= 0) {
                close(own);
            }
            return failed("list", p, error);
        }
        const std::unique_ptr<DIR, int (*)(DIR *)> closing(dir, closedir);

        while (true) {
            errno = 0;
            const dirent * cur = readdir(dir);
            if (!cur) {
                return errno == 0 ? result() : failed("list", p, errno);
            }

            const std::string name = cur->d_name;
            if (name == "." || name == "..") {
                continue;
            }

            struct stat st;
            if (fstatat(fd->fd, name.c_str(), &st, AT_SYMLINK_NOFOLLOW) == 0) {
                entries.push_back(entry_of(name, st));
            } else if (errno != ENOENT) {
                return failed("list", p / name, errno);
            }
        }
    }

    result look(const path & p, server_page_os_entry & entry) override {
        const place at(p);

        struct stat st;
        if (!at.dir || fstatat(at.dir->fd, at.name.c_str(), &st, AT_SYMLINK_NOFOLLOW) != 0) {
            return failed("look at", p, errno);
        }
        entry = entry_of(at.name, st);

        return {};
    }

    result create(const path & p, handle & file) override {
        const place at(p);

        const int flags = O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC;
        auto fd = at.dir ? wrapped(again([&]() { return openat(at.dir->fd, at.name.c_str(), flags, 0600); })) : nullptr;
        if (!fd) {
            return failed("create", p, errno);
        }
        if (fchmod(fd->fd, 0600) != 0) {
            return failed("set the mode of", p, errno);
        }
        file = std::move(fd);

        return {};
    }

    result open(const path & p, handle & file, uint64_t & n_bytes) override {
        const place at(p);

        // a pipe must not make us wait for who writes to it
        const int flags = O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC;
        auto fd = at.dir ? wrapped(again([&]() { return openat(at.dir->fd, at.name.c_str(), flags); })) : nullptr;

        struct stat st;
        if (!fd || fstat(fd->fd, &st) != 0) {
            return failed("open", p, errno);
        }
        if (!S_ISREG(st.st_mode)) {
            return failed("open", p, S_ISDIR(st.st_mode) ? EISDIR : EINVAL);
        }
        n_bytes = st.st_size;
        file    = std::move(fd);

        return {};
    }

    result write(const path & p, server_page_os_handle & file, const void * data, size_t size) override {
        const without_sigxfsz guard;

        const int    fd  = static_cast<fd_handle &>(file).fd;
        const char * src = static_cast<const char *>(data);

        while (size > 0) {
            const ssize_t n = again([&]() { return ::write(fd, src, std::min(size, N_CALL_MAX)); });
            if (n <= 0) {
                return failed("write", p, n < 0 ? errno : ENOSPC);
            }
            src  += n;
            size -= n;
        }

        return {};
    }

    result read(const path & p, server_page_os_handle & file, void * data, size_t size) override {
        const int fd  = static_cast<fd_handle &>(file).fd;
        char *    dst = static_cast<char *>(data);

        while (size > 0) {
            const ssize_t n = again([&]() { return ::read(fd, dst, std::min(size, N_CALL_MAX)); });
            if (n < 0) {
                return failed("read", p, errno);
            }
            if (n == 0) {
                return { SERVER_PAGE_OS_OTHER, "read " + p.str() + ": the file ends early" };
            }
            dst  += n;
            size -= n;
        }

        return {};
    }

    result sync(const path & p, server_page_os_handle & file) override {
        return sync_fd(static_cast<fd_handle &>(file).fd) == 0 ? result() : failed("sync", p, errno);
    }

    result sync_dir(const path & p) override {
        const auto fd = open_dir(p);
        if (!fd) {
            return failed("sync directory", p, errno);
        }
        if (sync_fd(fd->fd) != 0 && errno != EINVAL && errno != ENOTSUP && errno != EOPNOTSUPP) {
            return failed("sync directory", p, errno);
        }
        return {};
    }

    result rename(const path & from, const path & to) override {
        const place src(from);
        if (!src.dir) {
            return failed("rename", from, errno);
        }
        const place dst(to);
        if (!dst.dir || renameat(src.dir->fd, src.name.c_str(), dst.dir->fd, dst.name.c_str()) != 0) {
            return failed(("rename " + from.str() + " to").c_str(), to, errno);
        }
        return {};
    }

    result remove(const path & p) override {
        const place at(p);
        return at.dir && unlinkat(at.dir->fd, at.name.c_str(), 0) == 0 ? result() : failed("remove", p, errno);
    }

    result remove_dir(const path & p) override {
        const place at(p);
        return at.dir && unlinkat(at.dir->fd, at.name.c_str(), AT_REMOVEDIR) == 0 ? result() : failed("remove directory", p, errno);
    }

    result lock(const path & p, server_page_os_lock how, handle & held) override {
        const place at(p);
        if (!at.dir) {
            return failed("lock", p, errno);
        }

        const auto opened = [&](int flags) {
            return wrapped(again([&]() { return openat(at.dir->fd, at.name.c_str(), flags | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC, 0600); }));
        };

        // a lock that excludes is one of a file open for writing on some network file systems, one that shares is not
        const bool shared = how == SERVER_PAGE_OS_LOCK_SHARED || how == SERVER_PAGE_OS_LOCK_TRY_SHARED;
        const bool waits  = how == SERVER_PAGE_OS_LOCK_SHARED || how == SERVER_PAGE_OS_LOCK_EXCLUSIVE;

        fd_ptr fd;
        if (shared) {
            fd = opened(O_RDONLY);
            if (!fd && errno == ENOENT && waits) {
                fd = opened(O_RDWR | O_CREAT);
                if (!fd && (errno == EACCES || errno == EPERM || errno == EROFS)) {
                    return failed("lock", p, ENOENT);
                }
            }
        } else {
            fd = opened(waits ? O_RDWR | O_CREAT : O_RDWR);
        }
        if (!fd) {
            return failed("lock", p, errno);
        }
        if (waits) {
            (void) fchmod(fd->fd, 0600); // it may just have been made under a strange umask; not ours to change if it is another's
        }

        const int op = (shared ? LOCK_SH : LOCK_EX) | (waits ? 0 : LOCK_NB);
        if (again([&]() { return flock(fd->fd, op); }) != 0) {
            const bool busy = errno == EWOULDBLOCK;
            auto res = failed("lock", p, errno);
            if (busy) {
                res.status = SERVER_PAGE_OS_BUSY;
            }
            return res;
        }
        held = std::move(fd);

        return {};
    }
};

server_page_os & server_page_os_native() {
    static server_page_os_posix os;
    return os;
}

void server_page_os_give_way() {
#ifdef SCHED_BATCH // where it is defined, a nice value is of a thread, not of the process
    setpriority(PRIO_PROCESS, 0, 10);
#endif
}

void server_page_os_uncache(server_page_os_handle & file, uint64_t offset, size_t size) {
#ifdef POSIX_FADV_DONTNEED // some systems have no such call
    posix_fadvise(static_cast<fd_handle &>(file).fd, offset, size, POSIX_FADV_DONTNEED);
#else
    (void) file;
    (void) offset;
    (void) size;
#endif
}
