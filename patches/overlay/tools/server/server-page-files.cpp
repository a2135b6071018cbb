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

// nothing else gets the name going again
static result with_remedy(result res) {
    if (res.status == SERVER_PAGE_FILES_CORRUPT) {
        res.message += "; llamactl pages fsck puts it aside";
    }
    return res;
}

static result recover_page(const server_page_commit & page, bool dry_run, std::vector<std::string> & done) {
    server_page_record rec;
    bool found = false;
    if (auto res = page.load_record(rec, found); !res.ok()) {
        return res;
    }

    result res;
    if (found) {
        res = dry_run ? page.check(rec) : page.recover(rec);
        if (!res.ok()) {
            return res;
        }
        done.push_back((page.root / page.name).str() +
                (dry_run ? ": its publication would be completed" : ": its publication was completed"));
    }

    std::vector<std::string> swept;
    auto sweeping = page.sweep(dry_run, dry_run && found, swept);
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

server_page_files::server_page_files(server_page_os & os, const std::string & dir, const server_page_guard & guard) :
    os(os), dir(dir), guard(guard) {}

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
        res.members.push_back({ name + suffix, n_bytes, 0 });
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

    const server_page_commit page(os, dir, name, guard);

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
        return with_remedy(res);
    }

    res = page.make_stage(rec.stage, owner);
    if (res.ok()) {
        held.reset();
        res = page.write_stage(files, rec);
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
        warning = page.sweep(false, false, swept).message;
    }
    if (res.ok() && res.message.empty()) {
        res.message = warning;
    }
    return with_remedy(res);
}

result server_page_files::read(const std::string & name, const std::vector<std::string> & suffixes,
        const std::function<uint8_t * (const std::string & suffix, uint64_t n_bytes)> & allocate) {
    if (auto res = check_name(name); !res.ok()) {
        return res;
    }
    if (auto res = check_suffixes(suffixes); !res.ok()) {
        return res;
    }

    const server_page_commit page(os, dir, name, guard);

    handle held;
    if (auto res = server_page_told_unless_gone(os.lock(page.lock, SERVER_PAGE_OS_LOCK_SHARED, held)); !res.ok()) {
        return res;
    }

    server_page_record rec;
    bool pending = false;
    if (auto res = page.load_record(rec, pending); !res.ok()) {
        return with_remedy(res);
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
        return with_remedy(res);
    }
    auto res = read_page(page, suffixes, allocate);
    if (res.ok()) {
        res.message = warning;
    }
    return res;
}

// the name of a page of which this is the staging directory, empty: none
static std::string staged_name(const server_page_os_entry & entry) {
    if (!ends_in(entry.name, SERVER_PAGE_STAGING)) {
        return "";
    }
    const auto name = entry.name.substr(0, entry.name.size() - std::string(SERVER_PAGE_STAGING).size());
    return server_page_file_name_error(name).empty() ? name : "";
}

result server_page_files::recover(const std::string & name, bool dry_run, std::vector<std::string> & done) {
    done.clear();

    if (auto res = check_name(name); !res.ok()) {
        return res;
    }

    const server_page_commit page(os, dir, name, guard);

    handle held;
    const auto locked = dry_run
        ? server_page_told_unless_gone(os.lock(page.lock, SERVER_PAGE_OS_LOCK_SHARED, held))
        : server_page_told(os.lock(page.lock, SERVER_PAGE_OS_LOCK_EXCLUSIVE, held));

    return locked.ok() ? with_remedy(recover_page(page, dry_run, done)) : locked;
}

result server_page_files::list(std::vector<server_page_generation> & generations) {
    generations.clear();

    const path root = { dir, "" };

    handle held;
    if (auto res = server_page_told_unless_gone(os.lock(root / SERVER_PAGE_LOCK, SERVER_PAGE_OS_LOCK_SHARED, held)); !res.ok()) {
        return res;
    }
    std::vector<server_page_os_entry> entries;
    if (const auto listed = os.list(root, entries); listed.status == SERVER_PAGE_OS_NOT_FOUND) {
        return failed(SERVER_PAGE_FILES_NOT_FOUND, root.str() + ": there is no such directory");
    } else if (!listed.ok()) {
        return server_page_told(listed);
    }

    std::map<std::string, server_page_generation> found;
    for (const auto & entry : entries) {
        if (const auto name = staged_name(entry); !name.empty()) {
            found[name].staged = true;
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
