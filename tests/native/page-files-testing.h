// What the tests of page files share: generations that tell what they are, a directory for each test, and a file system
// that fails or dies at a chosen verb.

#pragma once

#include "server-page-files.h"

#include "testing.h"

#include <filesystem>
#include <fstream>
#include <functional>
#include <map>
#include <random>
#include <sstream>
#include <string>

static const char * const NAME = "page";

//
// generations: an even one has all four files, an odd one only two; 0: there is none
//

inline std::vector<std::string> suffixes_of(int generation) {
    return generation % 2 == 0 ? std::vector<std::string> { "", ".ckpt", ".lora", ".dft" } : std::vector<std::string> { "", ".ckpt" };
}

inline std::string contents_of(int generation, const std::string & suffix) {
    return std::to_string(generation) + " " + suffix + " " + std::string(50 + generation % 7, char('a' + generation % 26));
}

inline server_page_files_result publish(server_page_files & files, int generation, const std::string & name = NAME) {
    std::map<std::string, std::string> contents;
    std::vector<server_page_file> list;
    for (const auto & suffix : suffixes_of(generation)) {
        const auto & text = contents[suffix] = contents_of(generation, suffix);
        list.push_back({ suffix, { { text.data(), 10 }, { nullptr, 0 }, { text.data() + 10, text.size() - 10 } } });
    }
    return files.publish(name, list);
}

// the generation that is found, -1 where the result is an error; what is found is whole
inline int read_generation(server_page_files & files, server_page_files_result & res, const std::string & name = NAME) {
    std::map<std::string, std::string> found;
    res = files.read(name, suffixes_of(0), [&](const std::string & suffix, uint64_t n_bytes) {
        auto & text = found[suffix];
        text.resize(n_bytes);
        return reinterpret_cast<uint8_t *>(&text[0]);
    });
    if (!res.ok()) {
        return res.status == SERVER_PAGE_FILES_NOT_FOUND ? 0 : -1;
    }

    CHECK(found.count("") == 1);
    const int generation = std::atoi(found[""].c_str());

    CHECK_EQ(found.size(), suffixes_of(generation).size());
    for (const auto & suffix : suffixes_of(generation)) {
        CHECK_EQ(found[suffix], contents_of(generation, suffix));
    }
    return generation;
}

inline int read_generation(server_page_files & files, const std::string & name = NAME) {
    server_page_files_result res;
    const int generation = read_generation(files, res, name);
    if (generation < 0) {
        std::cerr << res.message << "\n";
    }
    return generation;
}

inline bool contains(const std::string & text, const std::string & part) {
    return text.find(part) != std::string::npos;
}

inline bool has_staging(server_page_os & os, const std::string & dir) {
    std::vector<server_page_os_entry> entries;
    CHECK(os.list({ dir, "" }, entries).ok());
    for (const auto & entry : entries) {
        if (contains(entry.name, ".page-staging")) {
            return true;
        }
    }
    return false;
}

//
// the native file system
//

struct temporary_dir {
    temporary_dir() {
        std::random_device random;
        do {
            path = (std::filesystem::temp_directory_path() / ("page-files-" + std::to_string(random()))).generic_string();
        } while (!std::filesystem::create_directory(path));
    }

    ~temporary_dir() { std::filesystem::remove_all(path); }

    temporary_dir(const temporary_dir &) = delete;

    // what a test left in it
    void clear() const {
        for (const auto & entry : std::filesystem::directory_iterator(path)) {
            std::filesystem::remove_all(entry.path());
        }
    }

    std::string operator/(const std::string & name) const { return path + "/" + name; }

    std::string path;
};

// a directory with a generation in it
struct page_dir : temporary_dir {
    explicit page_dir(int generation = 0) : files(os, path) {
        if (generation != 0) {
            CHECK(publish(files, generation).ok());
        }
    }

    server_page_os &  os = server_page_os_native();
    server_page_files files;
};

inline void write_text(const std::string & path, const std::string & text) {
    std::ofstream(std::filesystem::path(path), std::ios::binary) << text;
}

inline std::string read_text(const std::string & path) {
    std::ostringstream res;
    res << std::ifstream(std::filesystem::path(path), std::ios::binary).rdbuf();
    return res.str();
}

// a stage as a process leaves it that died while it wrote
inline std::string leave_stage(const page_dir & dir, const std::string & stage) {
    const auto path = dir / "page.page-staging/" + stage;
    std::filesystem::create_directories(path);
    write_text(path + "/.lock", "");
    write_text(path + "/page", "half");
    return path;
}

//
// faults
//

enum fault_moment {
    FAULT_BEFORE, // nothing was done
    FAULT_HALF,   // of a write; of any other verb nothing
    FAULT_AFTER,  // it was done, and yet
};

struct faulty_os final : server_page_os {
    explicit faulty_os(server_page_os & os, bool skip_syncs = false) : os(os), skip_syncs(skip_syncs) {}

    faulty_os(const faulty_os &) = delete; // one behind another is made of a server_page_os &

    server_page_os & os;
    const bool       skip_syncs;

    int  at           = 0;     // which verb, counted from 1; 0: none
    bool from_then_on = false; // and all after it
    std::string only;          // count this verb only; empty: all of them

    fault_moment          moment = FAULT_BEFORE;
    server_page_os_status status = SERVER_PAGE_OS_OTHER;
    std::function<void()> crash;            // instead of a status; does not return
    std::function<void(const std::string & verb)> before; // each verb

    int n_verbs = 0;

    bool was_hit() const { return at > 0 && n_verbs >= at; }

    uint64_t process_id() override { return os.process_id(); }

    result make_dir(const path & p, bool & made) override {
        return step("make_dir", p, [&]() { return os.make_dir(p, made); });
    }
    result list(const path & p, std::vector<server_page_os_entry> & entries) override {
        return step("list", p, [&]() { return os.list(p, entries); });
    }
    result look(const path & p, server_page_os_entry & entry) override {
        return step("look", p, [&]() { return os.look(p, entry); });
    }
    result create(const path & p, handle & file) override {
        return kept(file, step("create", p, [&]() { return os.create(p, file); }));
    }
    result open(const path & p, handle & file, uint64_t & n_bytes) override {
        return kept(file, step("open", p, [&]() { return os.open(p, file, n_bytes); }));
    }
    result write(const path & p, server_page_os_handle & file, const void * data, size_t size) override {
        return step("write", p, [&]() { return os.write(p, file, data, size); }, [&]() { return os.write(p, file, data, size / 2); });
    }
    result read(const path & p, server_page_os_handle & file, void * data, size_t size) override {
        return step("read", p, [&]() { return os.read(p, file, data, size); });
    }
    result sync(const path & p, server_page_os_handle & file) override {
        return step("sync", p, [&]() { return skip_syncs ? result() : os.sync(p, file); });
    }
    result sync_dir(const path & p) override {
        return step("sync_dir", p, [&]() { return skip_syncs ? result() : os.sync_dir(p); });
    }
    result rename(const path & from, const path & to) override {
        return step("rename", to, [&]() { return os.rename(from, to); });
    }
    result remove(const path & p) override {
        return step("remove", p, [&]() { return os.remove(p); });
    }
    result remove_dir(const path & p) override {
        return step("remove_dir", p, [&]() { return os.remove_dir(p); });
    }
    result lock(const path & p, server_page_os_lock how, handle & held) override {
        return kept(held, step("lock", p, [&]() { return os.lock(p, how, held); }));
    }

private:
    result step(const std::string & verb, const path & p, const std::function<result()> & work,
            const std::function<result()> & half = nullptr) {
        if (before) {
            before(verb);
        }

        if (!only.empty() && verb != only) {
            return work();
        }
        n_verbs++;
        if (at == 0 || n_verbs < at || (n_verbs > at && !from_then_on)) {
            return work();
        }

        if (moment == FAULT_AFTER) {
            work();
        } else if (moment == FAULT_HALF && half) {
            half();
        }
        if (crash) {
            crash();
        }
        return { status, verb + " " + p.str() + ": a fault of the test" };
    }

    // what failed gives nothing out
    static result kept(handle & given, result res) {
        if (!res.ok()) {
            given.reset();
        }
        return res;
    }
};

// a publication that has its record and moved so many of its files
inline void leave_pending(server_page_os & os, const std::string & dir, int generation, int n_moved) {
    faulty_os faulty(os);
    faulty.only = "rename"; // the first one places the record
    faulty.at   = 2 + n_moved;
    faulty.from_then_on = true;

    server_page_files files(faulty, dir);
    CHECK_EQ(publish(files, generation).status, SERVER_PAGE_FILES_PENDING);
}

// where it is in the stage of an interrupted publication
inline std::string staged_file(const page_dir & dir, const std::string & name) {
    for (const auto & entry : std::filesystem::recursive_directory_iterator(dir / "page.page-staging")) {
        if (entry.path().filename() == name) {
            return entry.path().generic_string();
        }
    }
    CHECK(false);
    return "";
}
