import socket
import time

server = socket.create_server(("", 29533))
time.sleep(200)
