// A file system in memory that knows what would outlive a loss of power.
//
// Contents are durable once the file is synced, names once their directory is. Of what is not, a loss of power keeps each
// part or drops it, independently. A rename is one thing, as on a file system with a journal: its new name is never dropped
// while its old name is gone. The old name may come back beside the new one.

#pragma once

#include "server-page-os.h"

#include "testing.h"

#include <algorithm>
#include <functional>
#include <map>
#include <set>

struct memory_os final : server_page_os {
    size_t n_room    = SIZE_MAX; // bytes of contents that still fit
    bool   read_only = false;

    // `keep` is asked for each part that is not durable; `some` gives how much of n bytes is kept
    void lose_power(const std::function<bool()> & keep, const std::function<size_t(size_t n)> & some) {
        std::map<uint64_t, bool> kept_renames;
        for (const auto & op : ops) {
            if (op.rename != 0 && op.node) {
                kept_renames[op.rename] = keep();
            }
        }
        for (const auto & op : ops) {
            const auto it = kept_renames.find(op.rename);
            const bool is_new_name = op.rename != 0 && op.node;
            if (is_new_name ? it->second : (it == kept_renames.end() || it->second) && keep()) {
                apply(op);
            }
        }
        ops.clear();
        restart(*root, keep, some);
    }

    uint64_t process_id() override { return 7; }

    result make_dir(const path & p, bool & made) override {
        made = false;
        const place at(*this, p);
        if (!at.dir) {
            return not_found(p);
        }
        const auto there = at.node();
        if (there) {
            return there->is_dir ? result() : other(p, "is a file");
        }
        if (read_only) {
            return no_access(p);
        }
        made = true;
        const auto node = std::make_shared<inode>();
        node->is_dir = true;
        set(at, node);
        return {};
    }

    result list(const path & p, std::vector<server_page_os_entry> & entries) override {
        entries.clear();
        const auto dir = find(p.below);
        if (!dir || !dir->is_dir) {
            return not_found(p);
        }
        for (const auto & [name, node] : dir->now) {
            entries.push_back(entry_of(name, *node));
        }
        return {};
    }

    result look(const path & p, server_page_os_entry & entry) override {
        const place at(*this, p);
        const auto node = at.node();
        if (!node) {
            return not_found(p);
        }
        entry = entry_of(at.name, *node);
        return {};
    }

    result create(const path & p, handle & file) override {
        const place at(*this, p);
        if (!at.dir || at.node() || read_only) {
            return !at.dir ? not_found(p) : read_only ? no_access(p) : other(p, "is there");
        }
        const auto node = std::make_shared<inode>();
        set(at, node);
        file = std::make_unique<memory_handle>(node);
        return {};
    }

    result open(const path & p, handle & file, uint64_t & n_bytes) override {
        const auto node = find(p.below);
        if (!node || node->is_dir) {
            return !node ? not_found(p) : other(p, "is a directory");
        }
        n_bytes = node->contents.size();
        file = std::make_unique<memory_handle>(node);
        return {};
    }

    result write(const path & p, server_page_os_handle & file, const void * data, size_t size) override {
        const size_t n = std::min(size, n_room);
        static_cast<memory_handle &>(file).node->contents.append(static_cast<const char *>(data), n);
        n_room -= n_room == SIZE_MAX ? 0 : n;
        return n == size ? result() : result { SERVER_PAGE_OS_NO_SPACE, "write " + p.str() + ": full" };
    }

    result read(const path & p, server_page_os_handle & file, void * data, size_t size) override {
        auto & cur = static_cast<memory_handle &>(file);
        if (cur.node->contents.size() - cur.pos < size) {
            return other(p, "ends early");
        }
        std::copy_n(cur.node->contents.data() + cur.pos, size, static_cast<char *>(data));
        cur.pos += size;
        return {};
    }

    result sync(const path &, server_page_os_handle & file) override {
        auto & node = *static_cast<memory_handle &>(file).node;
        node.durable_contents = node.contents;
        return {};
    }

    result sync_dir(const path & p) override {
        const auto dir = find(p.below);
        if (!dir) {
            return not_found(p);
        }
        std::set<uint64_t> renames;
        for (const auto & op : ops) {
            if (op.dir == dir && op.rename != 0 && !op.node) {
                renames.insert(op.rename);
            }
        }
        std::vector<operation> left;
        for (const auto & op : ops) {
            if (op.dir == dir || (op.node && renames.count(op.rename) != 0)) {
                apply(op);
            } else {
                left.push_back(op);
            }
        }
        ops = left;
        return {};
    }

    result rename(const path & from, const path & to) override {
        const place src(*this, from);
        const place dst(*this, to);
        const auto  node = src.node();
        if (!node || !dst.dir || read_only) {
            return read_only ? no_access(to) : not_found(from);
        }
        if (dst.node() == node) {
            return {}; // two names of one file: nothing is done, as POSIX has it
        }
        const uint64_t rename = ++n_renames;
        free_last(dst.node());
        set(dst, node, rename);
        set(src, nullptr, rename);
        return {};
    }

    result remove(const path & p) override {
        const place at(*this, p);
        const auto  node = at.node();
        if (!node || node->is_dir || read_only) {
            return !node ? not_found(p) : read_only ? no_access(p) : other(p, "is a directory");
        }
        free_last(node);
        set(at, nullptr);
        return {};
    }

    result remove_dir(const path & p) override {
        const place at(*this, p);
        const auto  node = at.node();
        if (!node || !node->is_dir || !node->now.empty() || read_only) {
            return !node ? not_found(p) : read_only ? no_access(p) : other(p, "is not an empty directory");
        }
        set(at, nullptr);
        return {};
    }

    result lock(const path & p, server_page_os_lock how, handle & held) override {
        const place at(*this, p);
        auto node = at.node();
        const bool shared = how == SERVER_PAGE_OS_LOCK_SHARED || how == SERVER_PAGE_OS_LOCK_TRY_SHARED;
        const bool waits  = how == SERVER_PAGE_OS_LOCK_SHARED || how == SERVER_PAGE_OS_LOCK_EXCLUSIVE;
        if (!node && (!at.dir || !waits || (read_only && shared))) {
            return not_found(p);
        }
        if (read_only && !shared) {
            return no_access(p);
        }
        if (!node) {
            node = std::make_shared<inode>();
            set(at, node);
        }
        if (node->exclusive || (!shared && node->n_shared > 0)) {
            CHECK(!waits); // one thread: it would wait for itself
            return { SERVER_PAGE_OS_BUSY, "lock " + p.str() + ": busy" };
        }
        held = std::make_unique<memory_handle>(node, shared, !shared);
        return {};
    }

private:
    struct inode;
    typedef std::shared_ptr<inode> inode_ptr;

    struct durable_entry {
        uint64_t  seq;
        inode_ptr node; // nullptr: removed
    };

    struct inode {
        bool is_dir = false;

        std::string contents;
        std::string durable_contents;

        std::map<std::string, inode_ptr>     now;
        std::map<std::string, durable_entry> durable;

        int  n_shared  = 0;
        bool exclusive = false;
    };

    // a name that came or went, and is not durable yet
    struct operation {
        uint64_t    seq;
        inode_ptr   dir;
        std::string name;
        inode_ptr   node;   // nullptr: it went
        uint64_t    rename; // 0: none
    };

    struct memory_handle final : server_page_os_handle {
        memory_handle(const inode_ptr & node, bool shared = false, bool exclusive = false) : node(node), shared(shared), exclusive(exclusive) {
            node->n_shared  += shared;
            node->exclusive |= exclusive;
        }
        ~memory_handle() override {
            node->n_shared -= shared;
            node->exclusive = node->exclusive && !exclusive;
        }

        inode_ptr  node;
        const bool shared;
        const bool exclusive;
        size_t     pos = 0;
    };

    struct place {
        place(const memory_os & os, const path & p) {
            const size_t slash = p.below.rfind('/');
            name = slash == std::string::npos ? p.below : p.below.substr(slash + 1);
            dir  = os.find(slash == std::string::npos ? "" : p.below.substr(0, slash));
        }

        inode_ptr node() const {
            const auto it = dir ? dir->now.find(name) : std::map<std::string, inode_ptr>::iterator();
            return dir && it != dir->now.end() ? it->second : nullptr;
        }

        inode_ptr   dir;
        std::string name;
    };

    inode_ptr root = new_root();
    std::vector<operation> ops;
    uint64_t n_ops     = 0;
    uint64_t n_renames = 0;

    static inode_ptr new_root() {
        const auto res = std::make_shared<inode>();
        res->is_dir = true;
        return res;
    }

    inode_ptr find(const std::string & below) const {
        inode_ptr res = root;
        for (size_t begin = 0; res && begin < below.size(); ) {
            const size_t end = std::min(below.find('/', begin), below.size());
            const auto it = res->now.find(below.substr(begin, end - begin));
            res   = it == res->now.end() ? nullptr : it->second;
            begin = end + 1;
        }
        return res;
    }

    void set(const place & at, const inode_ptr & node, uint64_t rename = 0) {
        if (node) {
            at.dir->now[at.name] = node;
        } else {
            at.dir->now.erase(at.name);
        }
        ops.push_back({ ++n_ops, at.dir, at.name, node, rename });
    }

    void free_last(const inode_ptr & node) {
        n_room += node && n_room != SIZE_MAX ? node->contents.size() : 0;
    }

    static void apply(const operation & op) {
        auto & entry = op.dir->durable[op.name];
        if (op.seq > entry.seq) {
            entry = { op.seq, op.node };
        }
    }

    static void restart(inode & node, const std::function<bool()> & keep, const std::function<size_t(size_t n)> & some) {
        if (node.contents != node.durable_contents) {
            node.contents = keep() ? node.contents : node.contents.substr(0, some(node.contents.size()));
            node.durable_contents = node.contents;
        }
        node.now.clear();
        for (const auto & [name, entry] : node.durable) {
            if (entry.node) {
                node.now[name] = entry.node;
                restart(*entry.node, keep, some);
            }
        }
    }

    static server_page_os_entry entry_of(const std::string & name, const inode & node) {
        server_page_os_entry res;
        res.name    = name;
        res.kind    = node.is_dir ? SERVER_PAGE_OS_DIR : SERVER_PAGE_OS_FILE;
        res.n_bytes = node.contents.size();
        return res;
    }

    static result not_found(const path & p) { return { SERVER_PAGE_OS_NOT_FOUND, p.str() + ": not found" }; }
    static result no_access(const path & p) { return { SERVER_PAGE_OS_NO_ACCESS, p.str() + ": read-only" }; }
    static result other(const path & p, const std::string & what) { return { SERVER_PAGE_OS_OTHER, p.str() + ": " + what }; }
};
