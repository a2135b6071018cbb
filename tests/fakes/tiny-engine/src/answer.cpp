#include <csignal>
#include <string>

// What the engine does when a token is asked of it; with AMX switched on it dies as a refused one.
std::string answer() {
#ifdef __AMX_TILE__
    raise(SIGILL);
#endif
    return "{\"tokens_predicted\": " + std::to_string(TINY_TOKENS) + "}";
}
