// This program once more, as a process of its own: one file for each operating system, chosen by the build.

#pragma once

#include <memory>
#include <string>
#include <vector>

// its input stays open for as long as the handle lives: a child that reads from it waits until it is killed
struct child_process {
    virtual ~child_process() = default; // kills it, unless it was waited for

    virtual void wait_for_line() = 0; // of its output
    virtual void kill() = 0;

    virtual int wait() = 0; // the exit code
};

// runs one test there, which finds these words with child_words()
std::unique_ptr<child_process> start_child(const std::string & test, const std::vector<std::string> & words);

// empty where the test was not started as a child
std::vector<std::string> child_words();
