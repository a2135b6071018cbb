#include "server-memory.h"

#include <algorithm>
#include <fstream>
#include <limits>
#include <sstream>
#include <string>

#ifdef __GLIBC__
#include <malloc.h>
#endif

#ifdef __linux__
#include <sys/mman.h>
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

// the files of a control group, by version
struct cgroup_files {
    const char * root;
    const char * limit;
    const char * usage;
    const char * reclaimable; // field of memory.stat: memory of files that nobody writes to counts as free
};

static constexpr cgroup_files CGROUP_V1 = { "/sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file" };
static constexpr cgroup_files CGROUP_V2 = { "/sys/fs/cgroup",        "memory.max",            "memory.current",        "inactive_file" };

// what is left of the limit of one control group
static int64_t cgroup_left(const cgroup_files & files, const std::string & path) {
    const std::string dir = files.root + path + "/";

    const int64_t limit = read_limit(dir + files.limit);
    const int64_t usage = read_limit(dir + files.usage);
    if (limit < 0 || limit == UNLIMITED || usage < 0) {
        return UNLIMITED;
    }

    const int64_t reclaimable = std::max<int64_t>(0, read_field(dir + "memory.stat", files.reclaimable));

    return std::max<int64_t>(0, limit - usage + reclaimable);
}

// every group on the path to the root has a limit of its own
static int64_t cgroup_path_left(const cgroup_files & files, std::string path) {
    int64_t res = cgroup_left(files, ""); // in a container the root is the own group

    while (path.size() > 1) {
        res = std::min(res, cgroup_left(files, path));
        path.resize(path.find_last_of('/'));
    }

    return res;
}

int64_t server_memory_available() {
    const int64_t kib = read_field("/proc/meminfo", "MemAvailable:");
    int64_t       res = kib < 0 ? UNLIMITED : kib * 1024;

    // "ID:CONTROLLERS:PATH", no controllers for version 2
    std::ifstream file("/proc/self/cgroup");
    std::string   line;
    while (std::getline(file, line)) {
        const size_t first  = line.find(':');
        const size_t second = line.find(':', first + 1);
        if (first == std::string::npos || second == std::string::npos) {
            continue;
        }

        const std::string controllers = "," + line.substr(first + 1, second - first - 1) + ",";
        const std::string path        = line.substr(second + 1);

        if (controllers == ",,") {
            res = std::min(res, cgroup_path_left(CGROUP_V2, path));
        } else if (controllers.find(",memory,") != std::string::npos) {
            res = std::min(res, cgroup_path_left(CGROUP_V1, path));
        }
    }

    return res == UNLIMITED ? 0 : std::max<int64_t>(1, res);
}

int64_t server_memory_resident() {
    return std::max<int64_t>(0, read_field("/proc/self/status", "RssAnon:")) * 1024;
}

void server_memory_prefer_huge_pages(void * data, size_t size) {
#ifdef MADV_HUGEPAGE
    const uintptr_t huge  = 2*1024*1024;
    const uintptr_t begin = ((uintptr_t) data + huge - 1) & ~(huge - 1);
    const uintptr_t end   = ((uintptr_t) data + size) & ~(huge - 1); // what would be rounded up is not asked for

    if (begin < end) {
        madvise((void *) begin, end - begin, MADV_HUGEPAGE);
    }
#else
    (void) data;
    (void) size;
#endif
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
