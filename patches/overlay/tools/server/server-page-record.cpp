#include "server-page-record.h"

#include "server-page-checksum.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>

const std::vector<std::string> & server_page_suffixes() {
    static const std::vector<std::string> res = { "", ".ckpt", ".lora", ".dft" };
    return res;
}

static std::string hex(uint64_t value) {
    char res[17];
    std::snprintf(res, sizeof(res), "%016llx", (unsigned long long) value);
    return res;
}

std::string server_page_record_text(const server_page_record & rec) {
    std::string res = "page commit 2\nstage " + rec.stage + "\n";
    for (const auto & member : rec.members) {
        res += "file " + std::to_string(member.n_bytes) + " " + hex(member.checksum) + " " + member.file + "\n";
    }
    for (const auto & file : rec.retired) {
        res += "retire " + file + "\n";
    }
    return res + "checksum " + hex(server_page_checksum(res.data(), res.size())) + "\n";
}

bool server_page_is_stage_name(const std::string & str) {
    return !str.empty() && str.find_first_not_of("0123456789-") == std::string::npos;
}

bool server_page_record_parse(const std::string & name, const std::string & text, server_page_record & rec) {
    rec = {};

    const auto is_own = [&](const std::string & file) {
        const auto & suffixes = server_page_suffixes();
        return std::any_of(suffixes.begin(), suffixes.end(), [&](const std::string & suffix) { return file == name + suffix; });
    };

    for (size_t begin = 0; begin < text.size(); ) {
        const size_t end   = std::min(text.find('\n', begin), text.size());
        const auto   line  = text.substr(begin, end - begin);
        const size_t space = line.find(' ');
        const auto   word  = line.substr(0, space);
        const auto   value = space == std::string::npos ? "" : line.substr(space + 1);

        if (word == "stage") {
            rec.stage = value;
        } else if (word == "retire") {
            rec.retired.push_back(value);
        } else if (word == "file") {
            char * next = nullptr;
            server_page_record::member member;
            member.n_bytes  = std::strtoull(value.c_str(), &next, 10);
            member.checksum = std::strtoull(next, &next, 16);
            member.file     = *next == ' ' ? next + 1 : "";
            rec.members.push_back(member);
        }
        begin = end + 1;
    }

    // a file that is listed as new and as retired would be put in place and removed
    std::vector<std::string> files = rec.retired;
    for (const auto & member : rec.members) {
        files.push_back(member.file);
    }
    const bool each_once = std::all_of(files.begin(), files.end(), [&](const std::string & file) {
        return is_own(file) && std::count(files.begin(), files.end(), file) == 1;
    });

    const bool has_state = std::any_of(rec.members.begin(), rec.members.end(), [&](const auto & member) { return member.file == name; });

    return each_once && has_state && server_page_is_stage_name(rec.stage) && server_page_record_text(rec) == text;
}
