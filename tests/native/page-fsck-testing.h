// What the tests of fsck and gc share: pages that are whole or damaged, and what was said about them.

#pragma once

#include "page-files-testing.h"

#include "server-page-fsck.h"

#include <algorithm>

#include <sys/stat.h>

namespace fs = std::filesystem;

constexpr uint32_t MAGIC   = 0x67677371;
constexpr uint32_t VERSION = 3;
constexpr int64_t  NOON    = 1790000000;
constexpr int64_t  DAY_S   = 24*60*60;

inline std::string u32(uint32_t value) {
    return { char(value & 0xff), char(value >> 8 & 0xff), char(value >> 16 & 0xff), char(value >> 24) };
}

inline server_page_span span(const std::string & text) { return { text.data(), text.size() }; }

inline std::string state_of(const std::string & text) { return u32(MAGIC) + u32(VERSION) + u32(1) + u32(10) + text; }

// FILE, FILE.ckpt and FILE.dft; damaged: FILE.ckpt has another checksum
inline void save(server_page_files & files, const std::string & name, const std::string & text = "the state", bool damaged = false) {
    const auto state = state_of(text);

    server_page_draft draft;
    draft.state = span(text);
    const auto bytes_draft = server_page_encode(draft);

    server_page_ckpt ckpt;
    ckpt.identity.fields = { { "model", "m" } };
    ckpt.members = { { "", state.size(), server_page_checksum(state.data(), state.size()) ^ damaged }, { ".dft", 0, server_page_checksum(bytes_draft.parts) } };
    for (const auto & part : bytes_draft.parts) {
        ckpt.members[1].n_bytes += part.size;
    }
    const auto bytes_ckpt = server_page_encode(ckpt);
    CHECK_EQ(bytes_draft.error + bytes_ckpt.error, std::string());
    CHECK(files.publish(name, { { "", { span(state) } }, { ".ckpt", bytes_ckpt.parts }, { ".dft", bytes_draft.parts } }).ok());
}

inline void flip_last(const std::string & path) {
    auto text = read_text(path);
    text.back() ^= 1;
    write_text(path, text);
}

inline std::string said(const server_page_finding & finding) {
    static const char * const words[] = { "whole", "plain", "degraded", "damaged", "unknown", "pending", "recovered", "orphan", "quarantined", "failed", "waiting" };

    std::string res = std::string(words[finding.what]) + " " + finding.name;
    for (const auto & loss : finding.losses) {
        res += " -" + loss.suffix;
    }
    if (!finding.to.empty()) {
        res += " > " + fs::path(finding.to).filename().string();
    }
    return res + (finding.removes ? " remove" : "") + (finding.done ? " done" : "") + "; ";
}

struct ran {
    std::string said;
    std::string whys;

    std::vector<server_page_finding> findings;

    server_page_fsck_status status;
};

typedef server_page_fsck_status (*verb_t)(server_page_os &, const std::string &, const server_page_fsck_options &, const server_page_tell &);

inline ran run(verb_t verb, server_page_os & os, const std::string & dir, bool dry_run = false, int64_t now_s = NOON, int64_t n_days = 30) {
    server_page_fsck_options options;
    options.dry_run = dry_run;
    options.magic   = MAGIC;
    options.version = VERSION;
    options.now_s   = now_s;
    options.n_days  = n_days;

    ran res;
    res.status = verb(os, dir, options, [&](const server_page_finding & finding) {
        res.said += said(finding);
        res.whys += finding.why + "\n";
        res.findings.push_back(finding);
    });
    return res;
}

inline ran fsck(const page_dir & dir, bool dry_run = false) { return run(server_page_fsck, dir.os, dir.path, dry_run); }

// names, modes and contents of all there is
inline std::string everything(const std::string & dir) {
    std::vector<std::string> lines;
    for (const auto & entry : fs::recursive_directory_iterator(dir)) {
        lines.push_back(fs::relative(entry.path(), dir).string() + (entry.is_regular_file() ? "=" + read_text(entry.path().string()) : "/"));
    }
    std::sort(lines.begin(), lines.end());
    std::string res;
    for (const auto & line : lines) {
        res += line + "\n";
    }
    return res;
}

inline unsigned mode_of(const std::string & path) {
    struct stat st;
    CHECK(lstat(path.c_str(), &st) == 0);
    return st.st_mode & 07777;
}

// a directory with one of each
inline void fill(page_dir & dir) {
    save(dir.files, "good");
    save(dir.files, "bad");
    flip_last(dir / "bad");
    save(dir.files, "less");
    flip_last(dir / "less.dft");
    write_text(dir / "plain", state_of("x"));
    write_text(dir / "readme", "a text of somebody's");
    save(dir.files, "gone");
    fs::remove(dir / "gone");
    write_text(dir / "other.lora", "another program's");
}

static const char * const FILLED = "whole good; degraded less -.dft; unknown other.lora; plain plain; unknown readme; ";
