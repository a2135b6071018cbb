#include "server-page-file-name.h"

#include <algorithm>
#include <vector>

static bool is_utf8(const std::string & str) {
    for (size_t i = 0; i < str.size(); ) {
        const unsigned char c = str[i];

        const size_t n = c < 0x80 ? 1 : c >= 0xc2 && c < 0xe0 ? 2 : c >= 0xe0 && c < 0xf0 ? 3 : c >= 0xf0 && c < 0xf5 ? 4 : 0;
        if (n == 0 || n > str.size() - i) {
            return false;
        }
        for (size_t k = 1; k < n; ++k) {
            if ((str[i + k] & 0xc0) != 0x80) {
                return false;
            }
        }

        // longer than it need be, half of a surrogate pair, past the last one
        const unsigned char next = n > 1 ? str[i + 1] : 0;
        if ((c == 0xe0 && next < 0xa0) || (c == 0xed && next > 0x9f) || (c == 0xf0 && next < 0x90) || (c == 0xf4 && next > 0x8f)) {
            return false;
        }
        i += n;
    }
    return true;
}

// what Windows takes for a device in any directory, whatever follows a dot; `lower` has no capital letters
static bool is_device(const std::string & lower) {
    static const std::vector<std::string> DEVICES = { "con", "prn", "aux", "nul", "conin$", "conout$" };
    static const std::vector<std::string> DIGITS  = { "0", "1", "2", "3", "4", "5", "6", "7", "8", "9", "\xc2\xb9", "\xc2\xb2", "\xc2\xb3" };

    std::string stem = lower.substr(0, lower.find('.'));
    stem.erase(stem.find_last_not_of(' ') + 1);

    if (stem.compare(0, 3, "com") == 0 || stem.compare(0, 3, "lpt") == 0) {
        return std::find(DIGITS.begin(), DIGITS.end(), stem.substr(3)) != DIGITS.end();
    }
    return std::find(DEVICES.begin(), DEVICES.end(), stem) != DEVICES.end();
}

std::string server_page_file_name_error(const std::string & name) {
    static const size_t N_MAX = 200; // bytes; the staging directory's suffix must fit into 255 beside it

    if (name.empty()) {
        return "the name of a page's file must not be empty";
    }
    if (name.size() > N_MAX) {
        return "the name of a page's file has at most " + std::to_string(N_MAX) + " bytes, this one has " + std::to_string(name.size());
    }
    if (std::any_of(name.begin(), name.end(), [](unsigned char c) { return c < 0x20 || c == 0x7f; })) {
        return "the name of a page's file must not have control characters";
    }
    if (name.find_first_of("/\\:*?\"<>|") != std::string::npos) {
        return "the name of a page's file must not have any of / \\ : * ? \" < > |";
    }
    if (!is_utf8(name)) {
        return "the name of a page's file must be UTF-8";
    }
    // after the check of UTF-8, so that no two characters are taken for one: U+0080 to U+009F
    for (size_t i = 0; i + 1 < name.size(); ++i) {
        if (name[i] == '\xc2' && (unsigned char) name[i + 1] < 0xa0) {
            return "the name of a page's file must not have control characters";
        }
    }
    if (name[0] == '.' || name[0] == ' ') {
        return "the name of a page's file must not begin with '.' or a space";
    }
    if (name.back() == '.' || name.back() == ' ') {
        return "the name of a page's file must not end in '.' or a space";
    }

    std::string lower = name;
    std::transform(lower.begin(), lower.end(), lower.begin(), [](unsigned char c) { return c >= 'A' && c <= 'Z' ? c + 32 : c; });
    for (const std::string suffix : { ".ckpt", ".lora", ".dft", ".page-staging" }) {
        if (lower.size() >= suffix.size() && lower.compare(lower.size() - suffix.size(), suffix.size(), suffix) == 0) {
            return "the name of a page's file must not end in '" + suffix + "', which belongs to the server";
        }
    }
    if (is_device(lower)) {
        return "the name of a page's file must not be that of a device on Windows, whatever follows a dot: con, prn, aux, nul, com1, lpt1 and the like";
    }
    return "";
}
