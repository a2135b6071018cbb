#include "server-page-os.h"

#include <algorithm>
#include <initializer_list>

#define WIN32_LEAN_AND_MEAN
#ifndef NOMINMAX
#define NOMINMAX
#endif
#include <windows.h>

// Paths are UTF-8 outside and wide inside. Contents are flushed before a name is given to them; MOVEFILE_WRITE_THROUGH makes
// the name durable in the same call, so that there is no directory left to sync. A removal cannot be written through: the
// journal keeps the order of such changes, so a page that comes back after a loss of power comes back whole.
// Files inherit the access of their directory: there are no modes. Virus scanners and indexers open files for a moment:
// what fails of that is tried again for N_SHARING_TRIES * SHARING_WAIT_MS. Such a file cannot be opened if it is not shared
// (sharing violation) and not be replaced even if it is (access denied); one that is removed meanwhile stays in its directory.

typedef server_page_os_result result;
typedef server_page_os_path   path;

static const DWORD DISK_QUOTA_EXCEEDED = 1295; // not in all headers

static const int   N_SHARING_TRIES = 40;
static const DWORD SHARING_WAIT_MS = 25;

// one call takes a DWORD
static const size_t N_CALL_MAX = size_t(1) << 30;

static std::wstring wide(const std::string & str) {
    const int n = MultiByteToWideChar(CP_UTF8, MB_ERR_INVALID_CHARS, str.data(), int(str.size()), nullptr, 0);
    std::wstring res(n, L'\0');
    MultiByteToWideChar(CP_UTF8, MB_ERR_INVALID_CHARS, str.data(), int(str.size()), &res[0], n);
    return res;
}

static std::string narrow(const std::wstring & str) {
    const int n = WideCharToMultiByte(CP_UTF8, 0, str.data(), int(str.size()), nullptr, 0, nullptr, nullptr);
    std::string res(n, '\0');
    WideCharToMultiByte(CP_UTF8, 0, str.data(), int(str.size()), &res[0], n, nullptr, nullptr);
    return res;
}

static result failed(const char * verb, const path & p, DWORD error) {
    result res;

    switch (error) {
        case ERROR_FILE_NOT_FOUND:
        case ERROR_PATH_NOT_FOUND:       res.status = SERVER_PAGE_OS_NOT_FOUND; break;
        case ERROR_DISK_FULL:
        case ERROR_HANDLE_DISK_FULL:
        case DISK_QUOTA_EXCEEDED:      
        case ERROR_FILE_TOO_LARGE:       res.status = SERVER_PAGE_OS_NO_SPACE;  break;
        case ERROR_ACCESS_DENIED:
        case ERROR_WRITE_PROTECT:        res.status = SERVER_PAGE_OS_NO_ACCESS; break;
        case ERROR_LOCK_VIOLATION:       res.status = SERVER_PAGE_OS_BUSY;      break;
        default:                         res.status = SERVER_PAGE_OS_OTHER;
    }

    wchar_t text[512];
    DWORD n = FormatMessageW(FORMAT_MESSAGE_FROM_SYSTEM | FORMAT_MESSAGE_IGNORE_INSERTS, nullptr, error, 0, text, 512, nullptr);
    while (n > 0 && (text[n - 1] == L'\n' || text[n - 1] == L'\r')) {
        n--;
    }
    res.message = std::string(verb) + " " + p.str() + ": " + (n > 0 ? narrow({ text, n }) : "error " + std::to_string(error));

    return res;
}

// the call returns ERROR_SUCCESS, or what went wrong; `passing`: what may be due to another program that is soon done
template <typename F> static DWORD with_patience(const F & call, std::initializer_list<DWORD> passing) {
    DWORD error = call();
    for (int i = 0; i < N_SHARING_TRIES && std::find(passing.begin(), passing.end(), error) != passing.end(); ++i) {
        Sleep(SHARING_WAIT_MS);
        error = call();
    }
    return error;
}

struct win32_handle final : server_page_os_handle {
    explicit win32_handle(HANDLE h) : h(h) {}

    ~win32_handle() override { CloseHandle(h); } // a lock goes with it

    win32_handle(const win32_handle &) = delete;
    win32_handle & operator=(const win32_handle &) = delete;

    const HANDLE h;
};

static HANDLE handle_of(server_page_os_handle & file) {
    return static_cast<win32_handle &>(file).h;
}

// All that is beyond the old limit of 260 characters needs an absolute path and this prefix, behind which nothing is
// interpreted any more: a client's part of a path must not be before, where "con" or "nul" would become a device.
static std::wstring native(const path & p) {
    const auto windows = [](const std::string & str) {
        std::wstring res = wide(str);
        std::replace(res.begin(), res.end(), L'/', L'\\');
        return res;
    };

    std::wstring dir = windows(p.dir);
    if (dir.compare(0, 4, L"\\\\?\\") != 0) {
        const DWORD n = GetFullPathNameW(dir.c_str(), 0, nullptr, nullptr);
        std::wstring full(n, L'\0');
        full.resize(GetFullPathNameW(dir.c_str(), n, &full[0], nullptr));

        dir = full.compare(0, 2, L"\\\\") == 0 ? L"\\\\?\\UNC" + full.substr(1) : L"\\\\?\\" + full;
    }
    if (!p.below.empty()) {
        dir += (!dir.empty() && dir.back() == L'\\' ? L"" : L"\\") + windows(p.below);
    }
    return dir;
}

static server_page_os_entry entry_of(const std::string & name, DWORD attributes, uint64_t n_bytes) {
    server_page_os_entry res;
    res.name = name;
    res.kind = attributes & FILE_ATTRIBUTE_REPARSE_POINT ? SERVER_PAGE_OS_ALIEN
        : attributes & FILE_ATTRIBUTE_DIRECTORY ? SERVER_PAGE_OS_DIR : SERVER_PAGE_OS_FILE;
    res.n_bytes = res.kind == SERVER_PAGE_OS_FILE ? n_bytes : 0;
    return res;
}

// the directories below the operator's own, up to the last part of the path: none of them may be a link or a mount point
static DWORD check_parents(const path & p) {
    for (size_t end = p.below.find('/'); end != std::string::npos; end = p.below.find('/', end + 1)) {
        const DWORD attributes = GetFileAttributesW(native({ p.dir, p.below.substr(0, end) }).c_str());
        if (attributes == INVALID_FILE_ATTRIBUTES) {
            return GetLastError();
        }
        if (attributes & FILE_ATTRIBUTE_REPARSE_POINT) {
            return ERROR_CANT_RESOLVE_FILENAME;
        }
        if (!(attributes & FILE_ATTRIBUTE_DIRECTORY)) {
            return ERROR_DIRECTORY;
        }
    }
    return ERROR_SUCCESS;
}

// a file and nothing else, opened itself where it is a link
static DWORD open_file(const path & p, DWORD access, DWORD share, DWORD how, std::unique_ptr<win32_handle> & file) {
    DWORD error = check_parents(p);
    if (error != ERROR_SUCCESS) {
        return error;
    }

    const auto str = native(p);
    error = with_patience([&]() -> DWORD {
        const DWORD  flags = FILE_ATTRIBUTE_NORMAL | FILE_FLAG_OPEN_REPARSE_POINT;
        const HANDLE h     = CreateFileW(str.c_str(), access, share, nullptr, how, flags, nullptr);
        if (h == INVALID_HANDLE_VALUE) {
            return GetLastError();
        }
        file = std::make_unique<win32_handle>(h);
        return ERROR_SUCCESS;
    }, { ERROR_SHARING_VIOLATION });
    if (error != ERROR_SUCCESS) {
        return error;
    }

    BY_HANDLE_FILE_INFORMATION info;
    if (!GetFileInformationByHandle(file->h, &info)) {
        error = GetLastError();
    } else if (info.dwFileAttributes & (FILE_ATTRIBUTE_REPARSE_POINT | FILE_ATTRIBUTE_DIRECTORY)) {
        error = ERROR_CANT_RESOLVE_FILENAME;
    }
    if (error != ERROR_SUCCESS) {
        file.reset();
    }
    return error;
}

struct server_page_os_win32 final : server_page_os {
    uint64_t process_id() override {
        return GetCurrentProcessId();
    }

    result make_dir(const path & p, bool & made) override {
        made = false;

        DWORD error = check_parents(p);
        if (error != ERROR_SUCCESS) {
            return failed("make directory", p, error);
        }
        made = CreateDirectoryW(native(p).c_str(), nullptr);
        if (made) {
            return {};
        }
        error = GetLastError();
        if (error != ERROR_ALREADY_EXISTS) {
            return failed("make directory", p, error);
        }

        server_page_os_entry entry;
        const auto looked = look(p, entry);
        return !looked.ok() ? looked : entry.kind == SERVER_PAGE_OS_DIR ? result() : failed("make directory", p, error);
    }

    result list(const path & p, std::vector<server_page_os_entry> & entries) override {
        entries.clear();

        // the last part is a directory on the way to its entries
        DWORD error = check_parents(p / "*");
        if (error != ERROR_SUCCESS) {
            return failed("list", p, error);
        }

        WIN32_FIND_DATAW data;
        const HANDLE found = FindFirstFileW(native(p / "*").c_str(), &data);
        if (found == INVALID_HANDLE_VALUE) {
            return failed("list", p, GetLastError());
        }
        do {
            const auto name = narrow(data.cFileName);
            if (name != "." && name != "..") {
                entries.push_back(entry_of(name, data.dwFileAttributes, uint64_t(data.nFileSizeHigh) << 32 | data.nFileSizeLow));
            }
        } while (FindNextFileW(found, &data));

        error = GetLastError();
        FindClose(found);

        return error == ERROR_NO_MORE_FILES ? result() : failed("list", p, error);
    }

    result look(const path & p, server_page_os_entry & entry) override {
        const DWORD error = check_parents(p);
        if (error != ERROR_SUCCESS) {
            return failed("look at", p, error);
        }

        WIN32_FILE_ATTRIBUTE_DATA data;
        if (!GetFileAttributesExW(native(p).c_str(), GetFileExInfoStandard, &data)) {
            return failed("look at", p, GetLastError());
        }
        entry = entry_of(p.below.substr(p.below.rfind('/') + 1), data.dwFileAttributes,
                uint64_t(data.nFileSizeHigh) << 32 | data.nFileSizeLow);

        return {};
    }

    result create(const path & p, handle & file) override {
        std::unique_ptr<win32_handle> made;
        const DWORD error = open_file(p, GENERIC_WRITE, FILE_SHARE_READ, CREATE_NEW, made);
        file = std::move(made);
        return error == ERROR_SUCCESS ? result() : failed("create", p, error);
    }

    result open(const path & p, handle & file, uint64_t & n_bytes) override {
        std::unique_ptr<win32_handle> opened;
        const DWORD error = open_file(p, GENERIC_READ, FILE_SHARE_READ | FILE_SHARE_DELETE, OPEN_EXISTING, opened);
        if (error != ERROR_SUCCESS) {
            return failed("open", p, error);
        }

        LARGE_INTEGER size;
        if (!GetFileSizeEx(opened->h, &size)) {
            return failed("open", p, GetLastError());
        }
        n_bytes = size.QuadPart;
        file    = std::move(opened);

        return {};
    }

    result write(const path & p, server_page_os_handle & file, const void * data, size_t size) override {
        const char * src = static_cast<const char *>(data);

        while (size > 0) {
            DWORD n = 0;
            if (!WriteFile(handle_of(file), src, DWORD(std::min(size, N_CALL_MAX)), &n, nullptr)) {
                return failed("write", p, GetLastError());
            }
            if (n == 0) {
                return failed("write", p, ERROR_DISK_FULL);
            }
            src  += n;
            size -= n;
        }

        return {};
    }

    result read(const path & p, server_page_os_handle & file, void * data, size_t size) override {
        char * dst = static_cast<char *>(data);

        while (size > 0) {
            DWORD n = 0;
            if (!ReadFile(handle_of(file), dst, DWORD(std::min(size, N_CALL_MAX)), &n, nullptr)) {
                return failed("read", p, GetLastError());
            }
            if (n == 0) {
                return { SERVER_PAGE_OS_OTHER, "read " + p.str() + ": the file ends early" };
            }
            dst  += n;
            size -= n;
        }

        return {};
    }

    result sync(const path & p, server_page_os_handle & file) override {
        return FlushFileBuffers(handle_of(file)) ? result() : failed("sync", p, GetLastError());
    }

    // names are written through by who gives them
    result sync_dir(const path & p) override {
        const DWORD error = check_parents(p / "*");
        return error == ERROR_SUCCESS ? result() : failed("sync directory", p, error);
    }

    result rename(const path & from, const path & to) override {
        DWORD error = check_parents(from);
        if (error == ERROR_SUCCESS) {
            error = check_parents(to);
        }
        if (error == ERROR_SUCCESS) {
            const auto src = native(from);
            const auto dst = native(to);
            error = with_patience([&]() -> DWORD {
                const DWORD flags = MOVEFILE_REPLACE_EXISTING | MOVEFILE_WRITE_THROUGH;
                return MoveFileExW(src.c_str(), dst.c_str(), flags) ? ERROR_SUCCESS : GetLastError();
            }, { ERROR_SHARING_VIOLATION, ERROR_ACCESS_DENIED });
        }
        return error == ERROR_SUCCESS ? result() : failed(("rename " + from.str() + " to").c_str(), to, error);
    }

    result remove(const path & p) override {
        DWORD error = check_parents(p);
        if (error == ERROR_SUCCESS) {
            const auto str = native(p);
            error = with_patience([&]() -> DWORD { return DeleteFileW(str.c_str()) ? ERROR_SUCCESS : GetLastError(); },
                    { ERROR_SHARING_VIOLATION, ERROR_ACCESS_DENIED });
        }
        return error == ERROR_SUCCESS ? result() : failed("remove", p, error);
    }

    result remove_dir(const path & p) override {
        DWORD error = check_parents(p);
        if (error == ERROR_SUCCESS) {
            const auto str = native(p);
            error = with_patience([&]() -> DWORD { return RemoveDirectoryW(str.c_str()) ? ERROR_SUCCESS : GetLastError(); },
                    { ERROR_SHARING_VIOLATION, ERROR_DIR_NOT_EMPTY });
        }
        return error == ERROR_SUCCESS ? result() : failed("remove directory", p, error);
    }

    result lock(const path & p, server_page_os_lock how, handle & held) override {
        const DWORD share  = FILE_SHARE_READ | FILE_SHARE_WRITE | FILE_SHARE_DELETE;
        const bool  shared = how == SERVER_PAGE_OS_LOCK_SHARED || how == SERVER_PAGE_OS_LOCK_TRY_SHARED;
        const bool  waits  = how == SERVER_PAGE_OS_LOCK_SHARED || how == SERVER_PAGE_OS_LOCK_EXCLUSIVE;

        std::unique_ptr<win32_handle> file;
        DWORD error = open_file(p, shared ? GENERIC_READ : GENERIC_READ | GENERIC_WRITE, share,
                how == SERVER_PAGE_OS_LOCK_EXCLUSIVE ? OPEN_ALWAYS : OPEN_EXISTING, file);
        if (error == ERROR_FILE_NOT_FOUND && how == SERVER_PAGE_OS_LOCK_SHARED) {
            error = open_file(p, GENERIC_READ | GENERIC_WRITE, share, OPEN_ALWAYS, file);
            if (error == ERROR_ACCESS_DENIED || error == ERROR_WRITE_PROTECT) {
                return failed("lock", p, ERROR_FILE_NOT_FOUND);
            }
        }
        if (error != ERROR_SUCCESS) {
            return failed("lock", p, error);
        }

        const DWORD flags = (shared ? 0 : LOCKFILE_EXCLUSIVE_LOCK) | (waits ? 0 : LOCKFILE_FAIL_IMMEDIATELY);
        OVERLAPPED all = {};
        if (!LockFileEx(file->h, flags, 0, MAXDWORD, MAXDWORD, &all)) {
            return failed("lock", p, GetLastError());
        }
        held = std::move(file);

        return {};
    }
};

server_page_os & server_page_os_native() {
    static server_page_os_win32 os;
    return os;
}

void server_page_os_give_way() {
    SetThreadPriority(GetCurrentThread(), THREAD_PRIORITY_BELOW_NORMAL);
}

void server_page_os_uncache(server_page_os_handle &, uint64_t, size_t) {
}
