#pragma once

// Pages by name in host memory, under one ceiling.
//
// A page is owned by the store and by whoever still works with it. Its bytes count against the ceiling until the last owner
// has let it go: the charge is taken before its memory is, and dies after its buffers. No llama.h: what a page holds is its own
// business, the store asks for a name and counts bytes. All members may be called from any thread.
//
// One page at a time may pass the ceiling while it is captured: the successor of a page that is still stored, or a copy that
// will be gone soon. So the pages take no more memory than the ceiling and one page.

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

// bytes that count against a ceiling for as long as this lives
struct server_page_charge {
    virtual ~server_page_charge() = default;
};

struct server_page_base {
    virtual ~server_page_base() = default;

    std::shared_ptr<server_page_charge> charge; // of the store's making; declared first: what a derived page holds is freed before it

    std::string name;

    size_t n_bytes = 0;
};

struct server_page_store {
    // bytes, 0: no ceiling
    explicit server_page_store(size_t limit = 0);

    void   set_limit(size_t limit);
    size_t limit() const;
    size_t used()  const; // by all pages that somebody still owns

    // charge for memory that is about to be taken, nullptr: it would pass the ceiling
    // for a page that will be put under the name: one that the store alone owns makes room for its successor
    std::shared_ptr<server_page_charge> reserve(const std::string & name, size_t n_bytes);

    // the same for a copy that will be gone soon
    std::shared_ptr<server_page_charge> reserve_passing(size_t n_bytes);

    // charge a page that is not stored for its bytes, in place of what was reserved for it; it is no longer passing if it fits now
    void settle(server_page_base & page);

    // charge the page for its bytes, in place of what was reserved for it, and put it under its name, in place of another one
    // returns false, and stores nothing, where that would pass the ceiling and must not
    // the one that it replaces is given to the caller: to free much memory takes a while
    bool put(std::shared_ptr<server_page_base> page, bool over_ceiling = false, std::shared_ptr<server_page_base> * replaced = nullptr);

    // nullptr: there is none of that name
    std::shared_ptr<server_page_base> get(const std::string & name) const;

    // no longer stored; the caller may own the last reference; nullptr: there is none of that name
    std::shared_ptr<server_page_base> remove(const std::string & name);

    // in the order in which they were put
    std::vector<std::shared_ptr<server_page_base>> list() const;

private:
    struct budget;
    struct entry {
        uint64_t n = 0; // counts up with every put
        std::shared_ptr<server_page_base> page;
    };

    std::shared_ptr<budget> bytes; // shared with the charges: a page may outlive the store

    mutable std::mutex mutex;
    std::map<std::string, entry> entries;
    uint64_t n_put = 0;

    size_t freed_by_replacing(const std::string & name) const;
    std::shared_ptr<server_page_charge> charge(size_t n_bytes, size_t n_bytes_freed, bool passing);
};

// what is wrong with a name that a client gives a page, empty: nothing
// 1 to 128 of A-Z a-z 0-9 . _ -, not beginning with a dot, a dash or "parked-", not ending in a suffix of a page's files
std::string server_page_name_error(const std::string & name);
