#include "server-page-commit.h"

#include <atomic>

typedef server_page_files_result  result;
typedef server_page_os_path       path;
typedef server_page_os_handle_ptr handle;

static const char * const RECORD_NEW = "commit.new";
static const char * const OWNER      = ".lock";

static result failed(server_page_files_status status, const std::string & message) {
    return { status, message };
}

result server_page_told(const server_page_os_result & res) {
    switch (res.status) {
        case SERVER_PAGE_OS_OK:        return {};
        case SERVER_PAGE_OS_NOT_FOUND: return failed(SERVER_PAGE_FILES_NOT_FOUND, res.message);
        case SERVER_PAGE_OS_NO_SPACE:  return failed(SERVER_PAGE_FILES_NO_SPACE,  res.message);
        case SERVER_PAGE_OS_NO_ACCESS: return failed(SERVER_PAGE_FILES_NO_ACCESS, res.message);
        case SERVER_PAGE_OS_BUSY:
        case SERVER_PAGE_OS_OTHER:     break;
    }
    return failed(SERVER_PAGE_FILES_IO, res.message);
}

result server_page_told_unless_gone(const server_page_os_result & res) {
    return res.status == SERVER_PAGE_OS_NOT_FOUND ? result() : server_page_told(res);
}

static result corrupt(const path & p, const std::string & what) {
    return failed(SERVER_PAGE_FILES_CORRUPT, p.str() + ": " + what);
}

result server_page_look_for_file(server_page_os & os, const path & p, bool & found, uint64_t & n_bytes) {
    server_page_os_entry entry;

    const auto looked = os.look(p, entry);
    found = looked.ok();
    if (!found) {
        return server_page_told_unless_gone(looked);
    }
    if (entry.kind != SERVER_PAGE_OS_FILE) {
        return failed(SERVER_PAGE_FILES_IO, p.str() + (entry.kind == SERVER_PAGE_OS_DIR
                ? ": a directory stands where a file of a page belongs"
                : ": a symlink or a device stands where a file of a page belongs, it is not followed"));
    }
    n_bytes = entry.n_bytes;

    return {};
}

server_page_commit::server_page_commit(server_page_os & os, const std::string & dir, const std::string & name) :
    os(os),
    root { dir, "" },
    name(name),
    lock(root / SERVER_PAGE_LOCK),
    staging(root / (name + SERVER_PAGE_STAGING)),
    record(staging / SERVER_PAGE_RECORD) {}

result server_page_commit::check_places() const {
    for (const auto & suffix : server_page_suffixes()) {
        bool     found   = false;
        uint64_t n_bytes = 0;
        if (auto res = server_page_look_for_file(os, root / (name + suffix), found, n_bytes); !res.ok()) {
            return res;
        }
    }
    return {};
}

result server_page_commit::settle(std::string & warning) const {
    server_page_record rec;
    bool found = false;
    if (auto res = load_record(rec, found); !res.ok()) {
        return res;
    }
    if (found) {
        auto res = complete(rec);
        if (!res.ok()) {
            res.message = "an interrupted publication of " + (root / name).str() + " cannot be completed: " + res.message;
            return res;
        }
        warning = res.message;
    }

    std::vector<std::string> swept;
    if (const auto res = sweep(false, swept); !res.ok()) {
        warning = res.message;
    }
    return {};
}

result server_page_commit::make_stage(std::string & stage, handle & owner) const {
    static std::atomic<uint64_t> n_made { 0 };

    bool made = false;
    if (auto res = server_page_told(os.make_dir(staging, made)); !res.ok()) {
        return res;
    }

    // one of another container may have our pid
    for (made = false; !made; ) {
        stage = std::to_string(os.process_id()) + "-" + std::to_string(n_made++);
        if (auto res = server_page_told(os.make_dir(staging / stage, made)); !res.ok()) {
            return res;
        }
    }

    return server_page_told(os.lock(staging / stage / OWNER, SERVER_PAGE_OS_LOCK_EXCLUSIVE, owner));
}

static result write_file(server_page_os & os, const path & p, const std::vector<server_page_span> & parts) {
    handle file;
    if (auto res = server_page_told(os.create(p, file)); !res.ok()) {
        return res;
    }
    for (const auto & part : parts) {
        if (part.size == 0) {
            continue;
        }
        if (auto res = server_page_told(os.write(p, *file, part.data, part.size)); !res.ok()) {
            return res;
        }
    }
    return server_page_told(os.sync(p, *file));
}

result server_page_commit::write_stage(const std::string & stage, const std::vector<server_page_file> & files) const {
    for (const auto & file : files) {
        if (auto res = write_file(os, staging / stage / (name + file.suffix), file.parts); !res.ok()) {
            return res;
        }
    }
    // the record must not outlive what it lists, nor the directories on the way there
    for (const auto & dir : { staging / stage, staging, root }) {
        if (auto res = server_page_told(os.sync_dir(dir)); !res.ok()) {
            return res;
        }
    }
    return {};
}

result server_page_commit::place_record(const server_page_record & rec) const {
    const auto text = server_page_record_text(rec);

    if (auto res = write_file(os, staging / RECORD_NEW, { { text.data(), text.size() } }); !res.ok()) {
        return res;
    }

    auto res = server_page_told(os.rename(staging / RECORD_NEW, record));
    if (!res.ok()) {
        // a network file system may have done it all the same: only one that is surely not there counts as not placed
        server_page_os_entry entry;
        if (os.look(record, entry).status != SERVER_PAGE_OS_NOT_FOUND) {
            res.status = SERVER_PAGE_FILES_PENDING;
        }
    }
    return res;
}

result server_page_commit::commit(const server_page_record & rec) const {
    auto res = place_record(rec);
    if (res.ok()) {
        res = complete(rec);
        if (!res.ok()) {
            res.status = SERVER_PAGE_FILES_PENDING;
        }
    }
    if (res.status == SERVER_PAGE_FILES_PENDING) {
        res.message = "the new generation of " + (root / name).str() +
            " is not surely in place, the next read or write of it completes it if it can: " + res.message;
    }
    return res;
}

result server_page_commit::load_record(server_page_record & rec, bool & found) const {
    handle   file;
    uint64_t n_bytes = 0;

    const auto opened = os.open(record, file, n_bytes);
    found = opened.ok();
    if (!found) {
        return server_page_told_unless_gone(opened);
    }
    if (n_bytes > SERVER_PAGE_RECORD_MAX) {
        return corrupt(record, "the commit record is damaged: " + std::to_string(n_bytes) + " bytes are too many");
    }

    std::string text(n_bytes, '\0');
    if (auto res = server_page_told(os.read(record, *file, &text[0], text.size())); !res.ok()) {
        return res;
    }
    if (!server_page_record_parse(name, text, rec)) {
        return corrupt(record, "the commit record is damaged, it is not known which files of the page belong together");
    }
    return {};
}

result server_page_commit::check_members(const server_page_record & rec, std::vector<std::string> & staged) const {
    staged.clear();
    for (const auto & member : rec.members) {
        bool     found   = false;
        uint64_t n_bytes = 0;
        if (auto res = server_page_look_for_file(os, staging / rec.stage / member.file, found, n_bytes); !res.ok()) {
            return res;
        }
        if (found) {
            staged.push_back(member.file);
        } else if (auto res = server_page_look_for_file(os, root / member.file, found, n_bytes); !res.ok()) {
            return res;
        }
        if (!found || n_bytes != member.n_bytes) {
            return corrupt(record, "it lists " + member.file + " of " + std::to_string(member.n_bytes) + " bytes, but there is " +
                    (found ? "one of " + std::to_string(n_bytes) + " bytes" : "none"));
        }
    }
    return {};
}

result server_page_commit::complete(const server_page_record & rec) const {
    // its writer may have died before this: a record that is seen need not be durable
    if (auto res = server_page_told(os.sync_dir(staging)); !res.ok()) {
        return res;
    }

    std::vector<std::string> staged;
    if (auto res = check_members(rec, staged); !res.ok()) {
        return res;
    }
    for (const auto & file : staged) {
        if (auto res = server_page_told(os.rename(staging / rec.stage / file, root / file)); !res.ok()) {
            return res;
        }
    }
    for (const auto & file : rec.retired) {
        if (auto res = server_page_told_unless_gone(os.remove(root / file)); !res.ok()) {
            return res;
        }
    }
    if (auto res = server_page_told(os.sync_dir(root)); !res.ok()) {
        return res;
    }
    if (auto res = server_page_told_unless_gone(os.remove(record)); !res.ok()) {
        return res;
    }

    result res;
    res.message = os.sync_dir(staging).message;
    return res;
}

result server_page_commit::sweep_stage(const path & stage, bool dry_run, std::vector<std::string> & swept, bool & left) const {
    left = true;

    handle     owner;
    const auto locked = os.lock(stage / OWNER, SERVER_PAGE_OS_LOCK_TRY, owner);
    if (locked.status == SERVER_PAGE_OS_BUSY) {
        return {};
    }
    if (!locked.ok() && locked.status != SERVER_PAGE_OS_NOT_FOUND) { // not found: it died between the two
        return server_page_told(locked);
    }
    owner.reset(); // nobody takes it: that needs the lock of the directory; some systems remove no file that is open

    std::vector<server_page_os_entry> entries;
    if (auto res = server_page_told(os.list(stage, entries)); !res.ok()) {
        return res;
    }
    if (!dry_run) {
        for (const auto & entry : entries) {
            if (auto res = server_page_told_unless_gone(os.remove(stage / entry.name)); !res.ok()) {
                return res;
            }
        }
        if (auto res = server_page_told_unless_gone(os.remove_dir(stage)); !res.ok()) {
            return res;
        }
    }
    swept.push_back(stage.str());
    left = false;

    return {};
}

result server_page_commit::sweep(bool dry_run, std::vector<std::string> & swept) const {
    std::vector<server_page_os_entry> entries;
    if (const auto listed = os.list(staging, entries); !listed.ok()) {
        return server_page_told_unless_gone(listed);
    }
    for (const auto & entry : entries) {
        if (entry.name == SERVER_PAGE_RECORD) {
            return {};
        }
    }

    result first;
    bool   empty = true;
    for (const auto & entry : entries) {
        const path p = staging / entry.name;

        result res;
        bool   left = true;
        if (entry.kind == SERVER_PAGE_OS_DIR && server_page_is_stage_name(entry.name)) {
            res = sweep_stage(p, dry_run, swept, left);
        } else if (entry.kind == SERVER_PAGE_OS_FILE && entry.name == RECORD_NEW) {
            res  = dry_run ? result() : server_page_told_unless_gone(os.remove(p));
            left = !res.ok();
        } else {
            res = failed(SERVER_PAGE_FILES_IO, p.str() + ": nothing that a publication makes, it is left alone");
        }

        first = first.ok() ? res : first;
        empty = empty && !left;
    }
    if (first.ok() && empty && !dry_run) {
        first = server_page_told_unless_gone(os.remove_dir(staging));
    }
    return first;
}
