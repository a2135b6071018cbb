#include "server-memory.h"

#include <algorithm>
#include <fstream>
#include <limits>
#include <sstream>
#include <string>

#ifdef __GLIBC__
#include <malloc.h>
#endif

static constexpr int64_t UNLIMITED = std::numeric_limits<int64_t>::max();

// the value of a line "NAME VALUE [kB]", -1 where there is no such line
static int64_t read_field(const std::string & path, const std::string & name) {
    std::ifstream file(path);
    std::string   line;

    while (std::getline(file, line)) {
        std::istringstream words(line);

        std::string key;
        int64_t     value;
        if (words >> key && key == name && words >> value) {
            return value;
        }
    }

    return -1;
}

// a control group file holds one number or "max", -1 where it holds neither or is not there
static int64_t read_limit(const std::string & path) {
    std::ifstream file(path);

    std::string word;
    if (!(file >> word)) {
        return -1;
    }
    if (word == "max") {
        return UNLIMITED;
    }

    try {
        return std::stoll(word);
    } catch (const std::exception &) {
        return -1;
    }
}

// what is left of the limit of one control group (v2); memory of files that nobody writes to counts as free
static int64_t cgroup_left(const std::string & dir) {
    const int64_t limit   = read_limit(dir + "/memory.max");
    const int64_t current = read_limit(dir + "/memory.current");
    if (limit < 0 || limit == UNLIMITED || current < 0) {
        return UNLIMITED;
    }

    const int64_t reclaimable = std::max<int64_t>(0, read_field(dir + "/memory.stat", "inactive_file"));

    return std::max<int64_t>(0, limit - current + reclaimable);
}

int64_t server_memory_available() {
    const int64_t kib = read_field("/proc/meminfo", "MemAvailable:");
    int64_t       res = kib < 0 ? UNLIMITED : kib * 1024;

    // "0::/path" is the unified hierarchy
    std::ifstream file("/proc/self/cgroup");
    std::string   line;
    while (std::getline(file, line)) {
        if (line.rfind("0::/", 0) != 0) {
            continue;
        }

        // every group on the path to the root has a limit of its own
        for (std::string path = line.substr(3); !path.empty(); path.resize(path.find_last_of('/'))) {
            res = std::min(res, cgroup_left("/sys/fs/cgroup" + path));
        }
    }

    return res == UNLIMITED ? 0 : std::max<int64_t>(1, res);
}

int64_t server_memory_resident() {
    return std::max<int64_t>(0, read_field("/proc/self/status", "RssAnon:")) * 1024;
}

void server_memory_prefer_mmap() {
#ifdef __GLIBC__
    // once a large block has been freed, glibc would take the next one of its size from a heap, which keeps what is freed
    mallopt(M_MMAP_THRESHOLD, 1024*1024);
#endif
}

void server_memory_trim() {
#ifdef __GLIBC__
    malloc_trim(0);
#endif
}
