#include "page-files-place.h"

#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <sstream>

#include <fcntl.h>
#include <sys/wait.h>
#include <unistd.h>

static const char * const WORDS = "PAGE_FILES_CHILD"; // in the environment, one a line

static void require(bool condition, const char * what) {
    if (!condition) {
        std::perror(what);
        std::exit(1);
    }
}

struct posix_child final : child_process {
    posix_child(pid_t pid, int input, int output) : pid(pid), input(input), output(output) {}

    ~posix_child() override {
        kill();
        close(input);
        close(output);
    }

    void wait_for_line() override {
        char c = 0;
        while (c != '\n') {
            require(read(output, &c, 1) == 1, "the output of a child ended");
        }
    }

    void kill() override {
        if (pid > 0) {
            ::kill(pid, SIGKILL);
            wait();
        }
    }

    int wait() override {
        int status = 0;
        require(waitpid(pid, &status, 0) == pid, "wait for a child");
        pid = 0;
        return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
    }

    pid_t     pid;
    const int input;
    const int output;
};

std::unique_ptr<child_process> start_child(const std::string & test, const std::vector<std::string> & words) {
    int in[2];
    int out[2];
    require(pipe2(in, O_CLOEXEC) == 0 && pipe2(out, O_CLOEXEC) == 0, "make pipes for a child");

    const pid_t pid = fork();
    require(pid >= 0, "start a child");
    if (pid == 0) {
        std::string joined;
        for (const auto & word : words) {
            joined += word + "\n";
        }
        setenv(WORDS, joined.c_str(), 1);
        dup2(in[0], STDIN_FILENO);
        dup2(out[1], STDOUT_FILENO);
        execl("/proc/self/exe", "child", test.c_str(), nullptr);
        _exit(127);
    }
    close(in[0]);
    close(out[1]);
    return std::make_unique<posix_child>(pid, in[1], out[0]);
}

std::vector<std::string> child_words() {
    const char * const joined = std::getenv(WORDS);
    std::istringstream lines(joined ? joined : "");

    std::vector<std::string> res;
    for (std::string line; std::getline(lines, line);) {
        res.push_back(line);
    }
    return res;
}
