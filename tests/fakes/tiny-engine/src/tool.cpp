// A stand-in for a test program of the same build: it says that it is there.

#include <cstdio>

int main() {
    std::puts("tool");
}
