// A part of a test in a child of its own, on the systems that can fork.

#pragma once

#include "testing.h"

#include <functional>

#include <grp.h>
#include <sys/wait.h>
#include <unistd.h>

// the exit code of a child that runs this; it never returns from it
inline int in_child(const std::function<void()> & run) {
    const pid_t pid = fork();
    CHECK(pid >= 0);
    if (pid == 0) {
        run();
        _exit(0);
    }
    int status = 0;
    CHECK(waitpid(pid, &status, 0) == pid);
    CHECK(WIFEXITED(status));
    return WEXITSTATUS(status);
}

// not root, who may do everything
inline void give_up_rights() {
    if (geteuid() == 0) {
        CHECK(setgroups(0, nullptr) == 0 && setgid(65534) == 0 && setuid(65534) == 0);
    }
}
