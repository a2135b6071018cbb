#include "page-files-place.h"

#include <cstdio>
#include <cstdlib>
#include <sstream>

#define WIN32_LEAN_AND_MEAN
#include <windows.h>

static const wchar_t * const WORDS = L"PAGE_FILES_CHILD"; // in the environment, one a line

static void require(bool condition, const char * what) {
    if (!condition) {
        std::fprintf(stderr, "%s: error %lu\n", what, GetLastError());
        std::exit(1);
    }
}

static std::wstring wide(const std::string & str) {
    std::wstring res(str.size(), L'\0');
    res.resize(MultiByteToWideChar(CP_UTF8, 0, str.data(), int(str.size()), &res[0], int(res.size())));
    return res;
}

struct win32_child final : child_process {
    win32_child(HANDLE process, HANDLE input, HANDLE output) : process(process), input(input), output(output) {}

    ~win32_child() override {
        kill();
        CloseHandle(process);
        CloseHandle(input);
        CloseHandle(output);
    }

    void wait_for_line() override {
        char c = 0;
        while (c != '\n') {
            DWORD n = 0;
            require(ReadFile(output, &c, 1, &n, nullptr) && n == 1, "the output of a child ended");
        }
    }

    void kill() override {
        if (!ended) {
            TerminateProcess(process, 1);
            wait();
        }
    }

    int wait() override {
        DWORD code = 0;
        require(WaitForSingleObject(process, INFINITE) == WAIT_OBJECT_0 && GetExitCodeProcess(process, &code), "wait for a child");
        ended = true;
        return int(code);
    }

    bool         ended = false;
    const HANDLE process;
    const HANDLE input;
    const HANDLE output;
};

std::unique_ptr<child_process> start_child(const std::string & test, const std::vector<std::string> & words) {
    SECURITY_ATTRIBUTES inherited = { sizeof(inherited), nullptr, TRUE };

    HANDLE in[2];
    HANDLE out[2];
    require(CreatePipe(&in[0], &in[1], &inherited, 0) && CreatePipe(&out[0], &out[1], &inherited, 0) &&
            SetHandleInformation(in[1], HANDLE_FLAG_INHERIT, 0) && SetHandleInformation(out[0], HANDLE_FLAG_INHERIT, 0),
            "make pipes for a child");

    std::string joined;
    for (const auto & word : words) {
        joined += word + "\n";
    }
    wchar_t program[MAX_PATH];
    require(GetModuleFileNameW(nullptr, program, MAX_PATH) > 0, "find the program");
    std::wstring command = L"\"" + std::wstring(program) + L"\" " + wide(test);

    STARTUPINFOW info = {};
    info.cb         = sizeof(info);
    info.dwFlags    = STARTF_USESTDHANDLES;
    info.hStdInput  = in[0];
    info.hStdOutput = out[1];
    info.hStdError  = GetStdHandle(STD_ERROR_HANDLE);

    PROCESS_INFORMATION child;
    SetEnvironmentVariableW(WORDS, wide(joined).c_str());
    require(CreateProcessW(nullptr, &command[0], nullptr, nullptr, TRUE, 0, nullptr, nullptr, &info, &child), "start a child");
    SetEnvironmentVariableW(WORDS, nullptr);

    CloseHandle(child.hThread);
    CloseHandle(in[0]);
    CloseHandle(out[1]);
    return std::make_unique<win32_child>(child.hProcess, in[1], out[0]);
}

std::vector<std::string> child_words() {
    std::wstring joined(32768, L'\0'); // the most that a variable has
    joined.resize(GetEnvironmentVariableW(WORDS, &joined[0], DWORD(joined.size())));

    std::string utf8(joined.size() * 3, '\0');
    utf8.resize(WideCharToMultiByte(CP_UTF8, 0, joined.data(), int(joined.size()), &utf8[0], int(utf8.size()), nullptr, nullptr));

    std::istringstream lines(utf8);
    std::vector<std::string> res;
    for (std::string line; std::getline(lines, line);) {
        res.push_back(line);
    }
    return res;
}
