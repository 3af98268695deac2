// Many transfers at once, asked for and waited for by several threads, and checksums of data of any length, anywhere:
// for the sanitizers (make sanitize).
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include <string>
#include <thread>
#include <vector>

#include "../files/checksum.h"
#include "../files/files.h"

static void check(bool holds, const char* what) {
    if (holds) return;
    fprintf(stderr, "files_tests: %s\n", what);
    exit(1);
}

static void use(pa_files* files, const std::string& path, int64_t base) {
    enum { COUNT = 64, NBYTES = 1000 };
    std::vector<std::vector<char>> sent(COUNT), found(COUNT, std::vector<char>(NBYTES));
    std::vector<int64_t> handles(COUNT);
    for (int i = 0; i < COUNT; i++) {
        sent[i].assign(NBYTES, (char)(base + i));
        handles[i] = pa_files_start(files, 1, path.c_str(), (base + i) * NBYTES, sent[i].data(), NBYTES);
    }
    for (int64_t handle : handles) check(pa_files_wait(files, handle) == NBYTES, "a write was not done");
    for (int i = 0; i < COUNT; i++)
        handles[i] = pa_files_start(files, 0, path.c_str(), (base + i) * NBYTES, found[i].data(), NBYTES);
    for (int i = COUNT - 1; i >= 0; i--) {
        check(pa_files_wait(files, handles[i]) == NBYTES, "a read was not done");
        check(pa_files_is_done(files, handles[i]) == 1, "a handle that was waited for is not done");
    }
    check(found == sent, "other bytes were read than were written");
}

static uint32_t crc32_by_bits(uint32_t crc, const uint8_t* data, int64_t nbytes) {
    crc = ~crc;
    for (int64_t i = 0; i < nbytes; i++) {
        crc ^= data[i];
        for (int bit = 0; bit < 8; bit++) crc = (crc >> 1) ^ (crc & 1 ? 0xEDB88320 : 0);
    }
    return ~crc;
}

static void check_checksums() {
    enum { MOST = 400 };
    for (int nbytes = 0; nbytes < MOST; nbytes++) {
        std::vector<uint8_t> data(nbytes + 1);  // as long as it has to be: reads beyond it are seen
        for (int i = 0; i <= nbytes; i++) data[i] = (uint8_t)(i * 167 + nbytes);
        for (uint32_t crc : {0u, 0xFFFFFFFFu, 0x12345678u})
            for (int first = 0; first <= 1 && first <= nbytes; first++)
                check(pa_crc32(crc, data.data() + first, nbytes) == crc32_by_bits(crc, data.data() + first, nbytes),
                      "a wrong checksum");
    }
}

int main() {
    check_checksums();
    char path[] = "/tmp/polyaccel-files-XXXXXX";
    const int file = mkstemp(path);
    check(file >= 0, "no file");
    close(file);
    pa_files* const files = pa_files_open(3);
    check(files != nullptr, "no threads");
    std::vector<std::thread> users;
    for (int64_t i = 0; i < 4; i++) users.emplace_back(use, files, path, i * 64);
    for (std::thread& user : users) user.join();
    std::vector<char> room(10);
    check(pa_files_wait(files, pa_files_start(files, 0, path, 256 * 1000 - 4, room.data(), 10)) == 4, "no short read");
    check(pa_files_wait(files, pa_files_start(files, 0, "/none/such", 0, room.data(), 10)) == -ENOENT, "no error");
    check(pa_files_wait(files, 12345) == -EINVAL, "an unknown handle was waited for");
    for (int i = 0; i < 8; i++) check(pa_files_start(files, 1, path, i, room.data(), 10) != 0, "refused");
    pa_files_close(files);  // with transfers that were not waited for
    unlink(path);
    check(pa_files_open(0) == nullptr, "files without threads");
    puts("files_tests: ok");
    return 0;
}
