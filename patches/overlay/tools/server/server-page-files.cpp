#include "server-page-files.h"

#include "server-page-commit.h"
#include "server-page-record.h"

#include <algorithm>
#include <map>

typedef server_page_files_result  result;
typedef server_page_os_path       path;
typedef server_page_os_handle_ptr handle;

static bool ends_in(const std::string & str, const std::string & suffix) {
    return str.size() >= suffix.size() && str.compare(str.size() - suffix.size(), suffix.size(), suffix) == 0;
}

static result failed(server_page_files_status status, const std::string & message) {
    return { status, message };
}

static result no_such_page(const server_page_commit & page) {
    return failed(SERVER_PAGE_FILES_NOT_FOUND, (page.root / page.name).str() + ": there is no such page");
}

static result retire(const server_page_commit & page, const std::string & suffix, bool & found) {
    const auto removed = page.os.remove(page.root / (page.name + suffix));
    found = found || removed.ok();
    return server_page_told_unless_gone(removed);
}

static result remove_page(const server_page_commit & page) {
    std::string warning;
    const auto settled = page.settle(warning);
    const bool damaged = settled.status == SERVER_PAGE_FILES_CORRUPT;
    if (!settled.ok() && !damaged) {
        return settled;
    }
    if (auto res = page.check_places(); !res.ok()) {
        return res;
    }

    // a record that was dropped, but may come back, would miss what is removed now
    if (auto res = server_page_told_unless_gone(page.os.sync_dir(page.staging)); !res.ok()) {
        return res;
    }
    if (auto res = server_page_told(page.os.sync_dir(page.root)); !res.ok()) {
        return res;
    }

    // without NAME there is no page: that it is gone must be durable before anything else goes
    bool found = damaged;
    for (const auto & suffix : server_page_suffixes()) {
        if (auto res = retire(page, suffix, found); !res.ok()) {
            return res;
        }
        if (suffix.empty()) {
            if (auto res = server_page_told(page.os.sync_dir(page.root)); !res.ok()) {
                return res;
            }
        }
    }
    if (auto res = server_page_told(page.os.sync_dir(page.root)); !res.ok()) {
        return res;
    }

    // last, so that a removal that is interrupted leaves no files that look like a page
    if (damaged) {
        if (auto res = server_page_told_unless_gone(page.os.remove(page.record)); !res.ok()) {
            return res;
        }
        if (auto res = server_page_told(page.os.sync_dir(page.staging)); !res.ok()) {
            return res;
        }
        if (auto res = page.settle(warning); !res.ok()) {
            return res;
        }
    }
    return found ? failed(SERVER_PAGE_FILES_OK, warning) : no_such_page(page);
}

static result recover_page(const server_page_commit & page, bool dry_run, std::vector<std::string> & done) {
    server_page_record rec;
    bool found = false;
    if (auto res = page.load_record(rec, found); !res.ok()) {
        return res;
    }

    result res;
    if (found) {
        std::vector<std::string> staged;
        res = dry_run ? page.check_members(rec, staged) : page.complete(rec);
        if (!res.ok()) {
            return res;
        }
        done.push_back((page.root / page.name).str() +
                (dry_run ? ": its publication would be completed" : ": its publication was completed"));
    }

    std::vector<std::string> swept;
    auto sweeping = page.sweep(dry_run, swept);
    for (const auto & stage : swept) {
        done.push_back(stage +
                (dry_run ? ": nobody owns this stage, it would be removed" : ": nobody owned this stage, it was removed"));
    }
    return sweeping.ok() ? res : sweeping;
}

static result read_page(const server_page_commit & page, const std::vector<std::string> & suffixes,
        const std::function<uint8_t * (const std::string & suffix, uint64_t n_bytes)> & allocate) {
    struct member {
        path      p;
        handle    file;
        uint64_t  n_bytes = 0;
        uint8_t * data    = nullptr;
    };
    std::vector<member> members;

    bool found = false;
    for (const auto & suffix : suffixes) {
        member cur;
        cur.p = page.root / (page.name + suffix);

        const auto opened = page.os.open(cur.p, cur.file, cur.n_bytes);
        if (opened.ok()) {
            found = found || suffix.empty();
            members.push_back(std::move(cur));
        } else if (opened.status != SERVER_PAGE_OS_NOT_FOUND || suffix.empty()) {
            return server_page_told(opened);
        }
    }
    if (!found) { // it was not asked for
        uint64_t n_bytes = 0;
        if (auto res = server_page_look_for_file(page.os, page.root / page.name, found, n_bytes); !res.ok()) {
            return res;
        }
        if (!found) {
            return no_such_page(page);
        }
    }

    const size_t n_root = (page.root / page.name).below.size();
    for (auto & cur : members) {
        cur.data = allocate(cur.p.below.substr(n_root), cur.n_bytes);
        if (!cur.data && cur.n_bytes > 0) {
            return failed(SERVER_PAGE_FILES_DECLINED,
                    cur.p.str() + ": its " + std::to_string(cur.n_bytes) + " bytes are more than is wanted");
        }
    }
    for (auto & cur : members) {
        if (auto res = server_page_told(page.os.read(cur.p, *cur.file, cur.data, cur.n_bytes)); !res.ok()) {
            return res;
        }
    }
    return {};
}

//
// server_page_files
//

server_page_files::server_page_files(server_page_os & os, const std::string & dir) : os(os), dir(dir) {}

static result check_suffixes(const std::vector<std::string> & suffixes) {
    const auto & known = server_page_suffixes();
    for (const auto & suffix : suffixes) {
        if (std::find(known.begin(), known.end(), suffix) == known.end()) {
            return failed(SERVER_PAGE_FILES_BAD_NAME, "a page has no file with the suffix '" + suffix + "'");
        }
        if (std::count(suffixes.begin(), suffixes.end(), suffix) > 1) {
            return failed(SERVER_PAGE_FILES_BAD_NAME, "a page has one file at most with the suffix '" + suffix + "'");
        }
    }
    return {};
}

static result check_files(const std::vector<server_page_file> & files) {
    std::vector<std::string> suffixes;
    for (const auto & file : files) {
        suffixes.push_back(file.suffix);
    }
    if (std::count(suffixes.begin(), suffixes.end(), "") == 0) {
        return failed(SERVER_PAGE_FILES_BAD_NAME, "a page has a file of its own name, without a suffix");
    }
    return check_suffixes(suffixes);
}

static result check_name(const std::string & name) {
    const auto error = server_page_file_name_error(name);
    return error.empty() ? result() : failed(SERVER_PAGE_FILES_BAD_NAME, error);
}

static server_page_record planned(const std::string & name, const std::vector<server_page_file> & files) {
    server_page_record res;
    for (const auto & suffix : server_page_suffixes()) {
        const auto it = std::find_if(files.begin(), files.end(), [&](const server_page_file & file) { return file.suffix == suffix; });
        if (it == files.end()) {
            res.retired.push_back(name + suffix);
            continue;
        }
        uint64_t n_bytes = 0;
        for (const auto & part : it->parts) {
            n_bytes += part.size;
        }
        res.members.push_back({ name + suffix, n_bytes });
    }
    return res;
}

result server_page_files::publish(const std::string & name, const std::vector<server_page_file> & files) {
    if (auto res = check_name(name); !res.ok()) {
        return res;
    }
    if (auto res = check_files(files); !res.ok()) {
        return res;
    }

    const server_page_commit page(os, dir, name);

    server_page_record rec = planned(name, files);
    std::string   warning;

    handle owner;
    handle held;
    result res = server_page_told(os.lock(page.lock, SERVER_PAGE_OS_LOCK_EXCLUSIVE, held));
    if (!res.ok()) {
        return res;
    }

    // dead stages take room that the new one may need; what cannot work is refused before gigabytes are written
    res = page.settle(warning);
    if (res.ok()) {
        res = page.check_places();
    }
    if (!res.ok()) {
        return res;
    }

    res = page.make_stage(rec.stage, owner);
    if (res.ok()) {
        held.reset();
        res = page.write_stage(rec.stage, files);
    }
    if (res.ok()) {
        res = server_page_told(os.lock(page.lock, SERVER_PAGE_OS_LOCK_EXCLUSIVE, held));
    }
    if (res.ok()) {
        res = page.settle(warning); // others have published meanwhile, and may have died
    }
    if (res.ok()) {
        res = page.check_places();
    }
    if (res.ok()) {
        res = page.commit(rec);
    }

    // where this fails the next publication, or recover(), does it: nobody owns the stage any more
    owner.reset();
    if (res.status != SERVER_PAGE_FILES_PENDING && (held || os.lock(page.lock, SERVER_PAGE_OS_LOCK_EXCLUSIVE, held).ok())) {
        std::vector<std::string> swept;
        warning = page.sweep(false, swept).message;
    }
    if (res.ok() && res.message.empty()) {
        res.message = warning;
    }
    return res;
}

result server_page_files::read(const std::string & name, const std::vector<std::string> & suffixes,
        const std::function<uint8_t * (const std::string & suffix, uint64_t n_bytes)> & allocate) {
    if (auto res = check_name(name); !res.ok()) {
        return res;
    }
    if (auto res = check_suffixes(suffixes); !res.ok()) {
        return res;
    }

    const server_page_commit page(os, dir, name);

    handle held;
    if (auto res = server_page_told_unless_gone(os.lock(page.lock, SERVER_PAGE_OS_LOCK_SHARED, held)); !res.ok()) {
        return res;
    }

    server_page_record rec;
    bool pending = false;
    if (auto res = page.load_record(rec, pending); !res.ok()) {
        return res;
    }
    if (!pending) {
        return read_page(page, suffixes, allocate); // without a lock where there can be none: nobody commits there
    }
    if (!held) {
        return failed(SERVER_PAGE_FILES_NO_ACCESS, page.record.str() +
                ": an interrupted publication must be completed first, but this directory may not be written");
    }

    // not given up in between: there is no moment at which another one could die half-way
    held.reset();
    if (auto res = server_page_told(os.lock(page.lock, SERVER_PAGE_OS_LOCK_EXCLUSIVE, held)); !res.ok()) {
        return res;
    }
    std::string warning;
    if (auto res = page.settle(warning); !res.ok()) {
        return res;
    }
    auto res = read_page(page, suffixes, allocate);
    if (res.ok()) {
        res.message = warning;
    }
    return res;
}

result server_page_files::remove(const std::string & name) {
    if (auto res = check_name(name); !res.ok()) {
        return res;
    }

    const server_page_commit page(os, dir, name);

    handle held;
    if (auto res = server_page_told(os.lock(page.lock, SERVER_PAGE_OS_LOCK_EXCLUSIVE, held)); !res.ok()) {
        return res;
    }
    return remove_page(page);
}

// the name of a page of which this is the staging directory, empty: none
static std::string staged_name(const server_page_os_entry & entry) {
    if (!ends_in(entry.name, SERVER_PAGE_STAGING)) {
        return "";
    }
    const auto name = entry.name.substr(0, entry.name.size() - std::string(SERVER_PAGE_STAGING).size());
    return server_page_file_name_error(name).empty() ? name : "";
}

result server_page_files::recover(bool dry_run, std::vector<std::string> & done) {
    done.clear();

    const path root = { dir, "" };

    std::vector<server_page_os_entry> entries;
    if (auto res = server_page_told(os.list(root, entries)); !res.ok()) {
        return res;
    }

    result first;
    for (const auto & entry : entries) {
        const auto name = staged_name(entry);
        if (name.empty()) {
            continue;
        }

        handle held;
        result res = dry_run
            ? server_page_told_unless_gone(os.lock(root / SERVER_PAGE_LOCK, SERVER_PAGE_OS_LOCK_SHARED, held))
            : server_page_told(os.lock(root / SERVER_PAGE_LOCK, SERVER_PAGE_OS_LOCK_EXCLUSIVE, held));
        if (res.ok()) {
            res = recover_page({ os, dir, name }, dry_run, done);
        }
        first = first.ok() ? res : first;
    }
    return first;
}

result server_page_files::list(std::vector<server_page_generation> & generations) {
    generations.clear();

    const path root = { dir, "" };

    handle held;
    if (auto res = server_page_told_unless_gone(os.lock(root / SERVER_PAGE_LOCK, SERVER_PAGE_OS_LOCK_SHARED, held)); !res.ok()) {
        return res;
    }
    std::vector<server_page_os_entry> entries;
    if (auto res = server_page_told(os.list(root, entries)); !res.ok()) {
        return res;
    }

    std::map<std::string, server_page_generation> found;
    for (const auto & entry : entries) {
        if (const auto name = staged_name(entry); !name.empty()) {
            server_page_os_entry record;
            const auto looked = os.look(root / entry.name / SERVER_PAGE_RECORD, record);
            if (!looked.ok() && looked.status != SERVER_PAGE_OS_NOT_FOUND) {
                return server_page_told(looked);
            }
            if (looked.ok()) {
                found[name].pending = true;
            }
            continue;
        }
        if (entry.kind != SERVER_PAGE_OS_FILE) {
            continue;
        }

        std::string suffix;
        for (const auto & cur : server_page_suffixes()) {
            suffix = ends_in(entry.name, cur) ? cur : suffix;
        }
        const auto name = entry.name.substr(0, entry.name.size() - suffix.size());
        if (server_page_file_name_error(name).empty()) {
            found[name].files.push_back({ suffix, entry.n_bytes });
        }
    }

    for (auto & [name, generation] : found) {
        generation.name = name;
        std::sort(generation.files.begin(), generation.files.end(),
                [](const auto & a, const auto & b) { return a.suffix < b.suffix; });
        generations.push_back(std::move(generation));
    }
    return {};
}
