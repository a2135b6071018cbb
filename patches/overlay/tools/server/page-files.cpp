// llama-page-files: checks and cleans a directory of page files, see server-page-fsck.h. What is found is a JSON object on a
// line of stdout each.

#include "server-page-fsck.h"

#include "llama.h"

#include <nlohmann/json.hpp>

#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <string>

using json = nlohmann::ordered_json;

static const char * const USAGE =
    "usage: llama-page-files fsck DIR [--dry-run]\n"
    "       llama-page-files gc   DIR [--dry-run] [--days N]\n"
    "\n"
    "fsck  finishes what was interrupted, checks every page, moves what is damaged or belongs to no page to DIR/.quarantine\n"
    "gc    finishes what was interrupted, removes what has been in DIR/.quarantine for N days (default: 30)\n"
    "\n"
    "Both may run beside an engine that uses DIR, and wait while it publishes. --dry-run changes nothing.\n"
    "Exit codes: 0 nothing is damaged; 1 something is: degraded, damaged or an orphan; 2 usage, or not everything could be\n"
    "read or done.\n";

static const int     EXIT_USAGE = 2;
static const int64_t N_DAYS_MAX = 36500;

static const char * word(server_page_finding_what what) {
    switch (what) {
        case SERVER_PAGE_FOUND_WHOLE:       return "whole";
        case SERVER_PAGE_FOUND_PLAIN:       return "plain";
        case SERVER_PAGE_FOUND_DEGRADED:    return "degraded";
        case SERVER_PAGE_FOUND_DAMAGED:     return "damaged";
        case SERVER_PAGE_FOUND_UNKNOWN:     return "unknown";
        case SERVER_PAGE_FOUND_PENDING:     return "pending";
        case SERVER_PAGE_FOUND_RECOVERED:   return "recovered";
        case SERVER_PAGE_FOUND_ORPHAN:      return "orphan";
        case SERVER_PAGE_FOUND_QUARANTINED: return "quarantined";
        case SERVER_PAGE_FOUND_FAILED:      return "failed";
        case SERVER_PAGE_FOUND_WAITING:     return "waiting";
    }
    return "";
}

static void print(const server_page_finding & finding) {
    json losses = json::array();
    for (const auto & loss : finding.losses) {
        losses.push_back({ { "file", finding.name + loss.suffix }, { "why", loss.why } });
    }
    const json line = {
        { "what",    word(finding.what) },
        { "name",    finding.name },
        { "n_bytes", finding.n_bytes },
        { "why",     finding.why },
        { "losses",  losses },
        { "to",      finding.to },
        { "removes", finding.removes },
        { "done",    finding.done },
    };

    // a path may be anything
    std::puts(line.dump(-1, ' ', false, json::error_handler_t::replace).c_str());
    std::fflush(stdout);
}

static bool parse_days(const char * text, int64_t & n_days) {
    char * end = nullptr;

    n_days = std::strtoll(text, &end, 10);
    return *text >= '0' && *text <= '9' && *end == '\0' && n_days <= N_DAYS_MAX;
}

int main(int argc, char ** argv) {
    const std::string verb = argc > 1 ? argv[1] : "";
    if (verb == "--help" || verb == "-h") {
        std::fputs(USAGE, stdout);
        return 0;
    }

    server_page_fsck_options options;
    options.magic   = LLAMA_STATE_SEQ_MAGIC;
    options.version = LLAMA_STATE_SEQ_VERSION;
    options.now_s   = std::time(nullptr);

    std::string dir;
    bool ok = verb == "fsck" || verb == "gc";
    for (int i = 2; i < argc; ++i) {
        const std::string arg = argv[i];
        if (arg == "--dry-run") {
            options.dry_run = true;
        } else if (arg == "--days" && verb == "gc" && i + 1 < argc) {
            ok = ok && parse_days(argv[++i], options.n_days);
        } else {
            ok  = ok && dir.empty() && !arg.empty() && arg[0] != '-';
            dir = arg;
        }
    }
    if (!ok || dir.empty()) {
        std::fputs(USAGE, stderr);
        return EXIT_USAGE;
    }

    server_page_os_give_way();

    const auto run  = verb == "fsck" ? server_page_fsck : server_page_gc;
    const auto done = run(server_page_os_native(), dir, options, print);

    // who reads this must not take a part of it for all
    return std::ferror(stdout) ? EXIT_USAGE : int(done);
}
