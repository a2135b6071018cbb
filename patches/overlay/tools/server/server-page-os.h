#pragma once

// The verbs of a file system that page files are made of: one signature each, one file per operating system, chosen by the
// build. No other source has a branch on the operating system, and tests put faults or another file system behind them.
//
// A path is a directory that the operator named, which is taken as it is, and what lies below it: parts between slashes
// that come from clients. No symlink is followed below the directory, at no part: one that stands in the way is an error.
// Files are readable for their owner only (0600, directories 0700), whatever the umask.
//
// All verbs may be called from any thread. None of them throws, none is tried again by who calls it: interrupted calls and
// short writes are continued inside.

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

enum server_page_os_status {
    SERVER_PAGE_OS_OK,
    SERVER_PAGE_OS_NOT_FOUND, // known not to be there; no other status may be taken for it
    SERVER_PAGE_OS_BUSY,      // somebody else holds the lock
    SERVER_PAGE_OS_NO_SPACE,  // on the disk, in the quota, or below the limit for the size of a file
    SERVER_PAGE_OS_NO_ACCESS, // by its mode, or a file system that is read-only
    SERVER_PAGE_OS_OTHER,
};

struct server_page_os_result {
    server_page_os_status status = SERVER_PAGE_OS_OK;

    std::string message; // what was tried, on which path, and what the operating system said

    bool ok() const { return status == SERVER_PAGE_OS_OK; }
};

struct server_page_os_path {
    std::string dir;
    std::string below; // empty: the directory itself

    server_page_os_path operator/(const std::string & part) const {
        return { dir, below.empty() ? part : below + "/" + part };
    }

    std::string str() const { return below.empty() ? dir : dir + "/" + below; }
};

// an open file or a lock; gives it back when it dies
struct server_page_os_handle {
    virtual ~server_page_os_handle() = default;
};

typedef std::unique_ptr<server_page_os_handle> server_page_os_handle_ptr;

enum server_page_os_kind {
    SERVER_PAGE_OS_FILE,
    SERVER_PAGE_OS_DIR,
    SERVER_PAGE_OS_ALIEN, // a symlink, a device, a pipe, a socket
};

struct server_page_os_entry {
    std::string         name;
    server_page_os_kind kind   = SERVER_PAGE_OS_FILE;
    uint64_t            n_bytes = 0; // of a file
};

enum server_page_os_lock {
    SERVER_PAGE_OS_LOCK_SHARED,     // waits; not found: there is no such file, and it may not be made here
    SERVER_PAGE_OS_LOCK_EXCLUSIVE,  // waits
    SERVER_PAGE_OS_LOCK_TRY,        // exclusive, of a file that is there; busy: somebody holds it
    SERVER_PAGE_OS_LOCK_TRY_SHARED, // the same beside others that share it
};

struct server_page_os {
    typedef server_page_os_result      result;
    typedef server_page_os_path        path;
    typedef server_page_os_handle_ptr  handle;

    virtual ~server_page_os() = default;

    // tells processes of one machine apart, not those of two containers
    virtual uint64_t process_id() = 0;

    // made: false where there is such a directory already
    virtual result make_dir(const path & p, bool & made) = 0;

    // without "." and ".."; what vanishes meanwhile is left out
    virtual result list(const path & p, std::vector<server_page_os_entry> & entries) = 0;

    // what is under the last part of the path itself, be it a symlink
    virtual result look(const path & p, server_page_os_entry & entry) = 0;

    // a new file for writing; an error where there is anything of that name
    virtual result create(const path & p, handle & file) = 0;

    // a file for reading, from its begin
    virtual result open(const path & p, handle & file, uint64_t & n_bytes) = 0;

    // all of it or an error; a file that ends early is an error. `p` is for the message
    virtual result write(const path & p, server_page_os_handle & file, const void * data, size_t size) = 0;
    virtual result read (const path & p, server_page_os_handle & file, void * data, size_t size) = 0;

    // the contents of the file outlive a loss of power
    virtual result sync(const path & p, server_page_os_handle & file) = 0;

    // the names in the directory outlive a loss of power. A file system that cannot sync a directory (EINVAL, ENOTSUP: some
    // that are mounted over a network or by FUSE) is taken by its word: there is nothing better to be had from it, and
    // to refuse would mean no pages there at all. What a name means is then as durable as that file system makes it.
    virtual result sync_dir(const path & p) = 0;

    // a file, in place of another one if there is one: who looks meanwhile finds either of the two; or a directory, to where
    // there is nothing
    virtual result rename(const path & from, const path & to) = 0;

    virtual result remove    (const path & p) = 0; // anything but a directory
    virtual result remove_dir(const path & p) = 0; // an empty one

    // an advisory lock between threads as well as processes, for as long as the handle or its process lives
    // a file that is not there is made, but not by those that only try
    virtual result lock(const path & p, server_page_os_lock how, handle & held) = 0;
};

// the one of the operating system
server_page_os & server_page_os_native();

// from now on the calling thread lets others go first, where a priority is a thread's own; it cannot be raised again
void server_page_os_give_way();

// what the system keeps in memory of a part of a native file may go: the file is not needed soon. Advice only
void server_page_os_uncache(server_page_os_handle & file, uint64_t offset, size_t size);
