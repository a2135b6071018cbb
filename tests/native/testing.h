// The frame of the native tests: TEST(name) registers a case, main runs all or those it is given.
//
// A test file opens with one line `// sources: a.cpp b.cpp`: the overlay sources it is linked with.

#pragma once

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <iostream>
#include <vector>

struct test_case {
    const char * name;
    void (*run)();
};

inline std::vector<test_case> & test_cases() {
    static std::vector<test_case> cases;
    return cases;
}

struct test_registration {
    test_registration(const char * name, void (*run)()) { test_cases().push_back({ name, run }); }
};

#define TEST(name)                                                \
    static void name();                                           \
    static const test_registration name##_registered(#name, name); \
    static void name()

#define CHECK(condition)                                                            \
    do {                                                                            \
        if (!(condition)) {                                                         \
            std::cerr << __FILE__ << ":" << __LINE__ << ": not so: " << #condition << "\n"; \
            std::exit(1);                                                           \
        }                                                                           \
    } while (0)

// both values are printed, so they need an operator<<; copies, for what is inside of a temporary
#define CHECK_EQ(found, expected)                                                        \
    do {                                                                                 \
        const auto check_found    = (found);                                             \
        const auto check_expected = (expected);                                          \
        if (!(check_found == check_expected)) {                                          \
            std::cerr << __FILE__ << ":" << __LINE__ << ": " << #found << " is " << check_found \
                      << ", expected " << check_expected << "\n";                         \
            std::exit(1);                                                                \
        }                                                                                \
    } while (0)

int main(int argc, char ** argv) {
    int n_run = 0;
    for (const test_case & test : test_cases()) {
        bool wanted = argc == 1;
        for (int i = 1; i < argc; i++) {
            wanted = wanted || std::strcmp(argv[i], test.name) == 0;
        }
        if (wanted) {
            std::cerr << test.name << "\n";
            test.run();
            n_run++;
        }
    }
    if (n_run == 0) {
        std::cerr << "no such test\n";
        return 1;
    }
    return 0;
}
