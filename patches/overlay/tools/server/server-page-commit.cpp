#include "server-page-commit.h"

#include <algorithm>
#include <atomic>

typedef server_page_files_result  result;
typedef server_page_os_path       path;
typedef server_page_os_handle_ptr handle;

static const char * const RECORD_NEW = "commit.new";
static const char * const OWNER      = ".lock";

static const size_t N_BYTES_PIECE = 1024*1024; // contents are read, written and summed up in pieces

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

server_page_commit::server_page_commit(server_page_os & os, const std::string & dir, const std::string & name, const server_page_guard & guard) :
    os(os),
    root { dir, "" },
    name(name),
    lock(root / SERVER_PAGE_LOCK),
    staging(root / (name + SERVER_PAGE_STAGING)),
    record(staging / SERVER_PAGE_RECORD),
    guard(guard) {}

result server_page_commit::check_places() const {
    for (const auto & suffix : server_page_suffixes()) {
        bool     found   = false;
        uint64_t n_bytes = 0;
        if (auto res = server_page_look_for_file(os, root / (name + suffix), found, n_bytes); !res.ok()) {
            return res;
        }
    }
    return guard ? guard(os, root.dir, name) : result();
}

result server_page_commit::settle(std::string & warning) const {
    server_page_record rec;
    bool found = false;
    if (auto res = load_record(rec, found); !res.ok()) {
        return res;
    }
    if (found) {
        auto res = recover(rec);
        if (!res.ok()) {
            res.message = "an interrupted publication of " + (root / name).str() + " cannot be completed: " + res.message;
            return res;
        }
        warning = res.message;
    }

    std::vector<std::string> swept;
    if (const auto res = sweep(false, false, swept); !res.ok()) {
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

static result write_file(server_page_os & os, const path & p, const std::vector<server_page_span> & parts, uint64_t & checksum) {
    handle file;
    if (auto res = server_page_told(os.create(p, file)); !res.ok()) {
        return res;
    }

    server_page_checksum_state sum;
    for (const auto & part : parts) {
        for (size_t offset = 0; offset < part.size; offset += N_BYTES_PIECE) {
            const auto * data = static_cast<const uint8_t *>(part.data) + offset;
            const size_t size = std::min(N_BYTES_PIECE, part.size - offset);

            sum.add(data, size);
            if (auto res = server_page_told(os.write(p, *file, data, size)); !res.ok()) {
                return res;
            }
        }
    }
    checksum = sum.value();

    return server_page_told(os.sync(p, *file));
}

static result read_checksum(server_page_os & os, const path & p, uint64_t & checksum) {
    handle   file;
    uint64_t n_left = 0;
    if (auto res = server_page_told(os.open(p, file, n_left)); !res.ok()) {
        return res;
    }

    server_page_checksum_state sum;
    std::vector<uint8_t> piece(std::min<uint64_t>(n_left, N_BYTES_PIECE));
    while (n_left > 0) {
        const size_t size = std::min<uint64_t>(n_left, piece.size());
        if (auto res = server_page_told(os.read(p, *file, piece.data(), size)); !res.ok()) {
            return res;
        }
        sum.add(piece.data(), size);
        n_left -= size;
    }
    checksum = sum.value();

    return {};
}

result server_page_commit::write_stage(const std::vector<server_page_file> & files, server_page_record & rec) const {
    for (const auto & file : files) {
        const auto member = std::find_if(rec.members.begin(), rec.members.end(), [&](const auto & cur) { return cur.file == name + file.suffix; });
        if (auto res = write_file(os, staging / rec.stage / member->file, file.parts, member->checksum); !res.ok()) {
            return res;
        }
    }
    // the record must not outlive what it lists, nor the directories on the way there
    for (const auto & dir : { staging / rec.stage, staging, root }) {
        if (auto res = server_page_told(os.sync_dir(dir)); !res.ok()) {
            return res;
        }
    }
    return {};
}

result server_page_commit::place_record(const server_page_record & rec) const {
    const auto text = server_page_record_text(rec);

    uint64_t checksum = 0; // it has its own
    if (auto res = write_file(os, staging / RECORD_NEW, { { text.data(), text.size() } }, checksum); !res.ok()) {
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

result server_page_commit::find_members(const server_page_record & rec, std::vector<std::string> & staged) const {
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

result server_page_commit::check_contents(const server_page_record & rec, const std::vector<std::string> & staged) const {
    for (const auto & member : rec.members) {
        const bool is_staged = std::find(staged.begin(), staged.end(), member.file) != staged.end();

        uint64_t checksum = 0;
        if (auto res = read_checksum(os, (is_staged ? staging / rec.stage : root) / member.file, checksum); !res.ok()) {
            return res;
        }
        if (checksum != member.checksum) {
            return corrupt(record, "it lists " + member.file + ", but what is there is another file, or was damaged after it was written");
        }
    }
    return {};
}

result server_page_commit::check(const server_page_record & rec) const {
    std::vector<std::string> staged;
    if (auto res = find_members(rec, staged); !res.ok()) {
        return res;
    }
    if (auto res = check_contents(rec, staged); !res.ok()) {
        return res;
    }
    return check_places();
}

result server_page_commit::recover(const server_page_record & rec) const {
    if (auto res = check(rec); !res.ok()) {
        return res;
    }
    return complete(rec);
}

result server_page_commit::complete(const server_page_record & rec) const {
    // its writer may have died before this: a record that is seen need not be durable
    if (auto res = server_page_told(os.sync_dir(staging)); !res.ok()) {
        return res;
    }

    std::vector<std::string> staged;
    if (auto res = find_members(rec, staged); !res.ok()) {
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

static result alien(const path & p) {
    return failed(SERVER_PAGE_FILES_IO, p.str() + ": nothing that a publication makes, it is left alone");
}

bool server_page_commit::is_staged_name(const std::string & file) const {
    const auto & suffixes = server_page_suffixes();
    return file == OWNER || std::any_of(suffixes.begin(), suffixes.end(), [&](const std::string & suffix) { return file == name + suffix; });
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

    result first;
    for (const auto & entry : entries) {
        const path p = stage / entry.name;

        result res;
        if (entry.kind != SERVER_PAGE_OS_FILE || !is_staged_name(entry.name)) {
            res = alien(p);
        } else if (!dry_run) {
            res = server_page_told_unless_gone(os.remove(p));
        }
        first = first.ok() ? res : first;
    }
    if (first.ok() && !dry_run) {
        first = server_page_told_unless_gone(os.remove_dir(stage));
    }
    if (first.ok()) {
        swept.push_back(stage.str());
        left = false;
    }
    return first;
}

result server_page_commit::sweep(bool dry_run, bool is_completed, std::vector<std::string> & swept) const {
    std::vector<server_page_os_entry> entries;
    if (const auto listed = os.list(staging, entries); !listed.ok()) {
        return server_page_told_unless_gone(listed);
    }
    const auto has_record = std::find_if(entries.begin(), entries.end(), [](const auto & entry) { return entry.name == SERVER_PAGE_RECORD; });
    if (has_record != entries.end() && !is_completed) {
        return {};
    }
    if (has_record != entries.end()) {
        entries.erase(has_record);
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
            res = alien(p);
        }

        first = first.ok() ? res : first;
        empty = empty && !left;
    }
    if (first.ok() && empty && !dry_run) {
        first = server_page_told_unless_gone(os.remove_dir(staging));
    }
    return first;
}
