// A stand-in for llama-server: /health and /completion on the unix socket that --host names.

#include <csignal>
#include <cstring>
#include <string>

#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

std::string answer();

int main(int argc, char ** argv) {
    sockaddr_un address = {};
    address.sun_family = AF_UNIX;
    for (int i = 1; i + 1 < argc; i++) {
        if (std::strcmp(argv[i], "--host") == 0) {
            std::strncpy(address.sun_path, argv[i + 1], sizeof(address.sun_path) - 1);
        }
    }
    signal(SIGPIPE, SIG_IGN);
    const int listener = socket(AF_UNIX, SOCK_STREAM, 0);
    if (bind(listener, (const sockaddr *) &address, sizeof(address)) != 0 || listen(listener, 4) != 0) {
        return 3;
    }
    while (true) {
        const int client = accept(listener, nullptr, nullptr);
        std::string request;
        char buffer[4096];
        while (request.find("\r\n\r\n") == std::string::npos) {
            const ssize_t n = read(client, buffer, sizeof(buffer));
            if (n <= 0) {
                break;
            }
            request.append(buffer, n);
        }
        const std::string body = request.rfind("POST /completion", 0) == 0 ? answer() : "{}";
        const std::string response = "HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: " +
            std::to_string(body.size()) + "\r\n\r\n" + body;
        if (write(client, response.data(), response.size()) < 0) {
            // the client left
        }
        close(client);
    }
}
